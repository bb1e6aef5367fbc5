"""Cuts what a rank writes at the ends of lines, whatever their lengths, in bounded memory.

Lines that come together stay together, as one block: only few of those who read them need each line. How the bytes
arrive makes no difference to the lines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

LONGEST = 16 * 1024
"""Bytes that are held back for the end of a line. A longer one comes in parts of this size."""


class Block(NamedTuple):
    """Whole lines with their ends, or a part of a long line.

    Attributes:
        begins, ends: whether `data` begins, and ends, where a line does. Only then may it be several lines.
    """

    data: bytes
    begins: bool
    ends: bool


@dataclass
class Lines:
    """Feed it what arrives; `finish` gives the rest.

    Attributes:
        longest: of a line that is not cut; at least 2, for \\r\\n.
        whole, longest_whole: the same for lines with this beginning.
        held: what waits for the end of its line.
        begins: whether what is held is the beginning of a line.
    """

    longest: int = LONGEST
    whole: bytes = b""
    longest_whole: int = LONGEST
    held: bytes = b""
    begins: bool = True

    def feed(self, data: bytes) -> Iterator[Block]:
        data = self.held + data
        # A carriage return (a progress bar's) is a line's end as well; at the very end of what has come it may be
        # the first half of one.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        block = data[:end]
        if self.begins and not self._may_be_long(block):
            if block:
                yield Block(block, begins=True, ends=True)
        else:
            for line in block.splitlines(keepends=True):
                rest = yield from self._parts(line)
                yield Block(rest, self.begins, ends=True)
                self.begins = True
        self.held = yield from self._parts(data[end:])

    def lines(self, data: bytes) -> Iterator[bytes]:
        """`feed`, line by line."""
        for block in self.feed(data):
            yield from block.data.splitlines(keepends=True)

    def finish(self) -> Iterator[Block]:
        if self.held:
            yield Block(self.held, self.begins, ends=False)
            self.held, self.begins = b"", False

    def _may_be_long(self, lines: bytes) -> bool:
        """Whether one of them may be longer than `longest`: not if there are two ends in every such stretch."""
        half = self.longest // 2
        return any(
            lines.find(b"\n", at, at + half) < 0 and lines.find(b"\r", at, at + half) < 0
            for at in range(0, len(lines), half)
        )

    def _parts(self, line: bytes) -> Generator[Block, None, bytes]:
        """Parts of a line that is too long to be held; returns the rest."""
        at = 0
        while len(line) - at > self._limit(line):
            yield Block(line[at : at + self.longest], self.begins, ends=False)
            self.begins = False
            at += self.longest
        return line[at:]

    def _limit(self, line: bytes) -> int:
        whole = self.begins and self.whole and line.startswith(self.whole)
        return self.longest_whole if whole else self.longest
