"""Split a rank's output into lines of any length, in bounded memory.

Lines that arrive together stay together in one block, as few consumers need each line separately. The split does not
depend on how the bytes arrive.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

LONGEST = 16 * 1024
"""Bytes held back while waiting for the end of a line. A longer line is split into parts of this size."""
LONGEST_NEWS = 1 << 20
"""The same for JSON: a line lists the nodes of all tasks, or holds 64 kB of output, six times as long there."""


class Block(NamedTuple):
    """Whole lines with their line ends, or a part of a long line.

    Attributes:
        data: The bytes.
        begins, ends: Whether `data` begins at the start, and ends at the end, of a line. Only if both does it hold
            several lines.
    """

    data: bytes
    begins: bool
    ends: bool


@dataclass
class Lines:
    """Incremental line splitter: pass data to `feed`, and call `finish` for the rest.

    Attributes:
        longest: Maximum bytes of a line that is not split; at least 2, for \\r\\n.
        whole: Prefix of lines with a different maximum.
        longest_whole: Maximum bytes of a line with this prefix.
        held: Bytes waiting for the end of their line.
        begins: Whether `held` starts at the beginning of a line.
    """

    longest: int = LONGEST
    whole: bytes = b""
    longest_whole: int = LONGEST
    held: bytes = b""
    begins: bool = True

    def feed(self, data: bytes) -> Iterator[Block]:
        data = self.held + data
        # A carriage return (from a progress bar) also ends a line. As the very last byte it may be the first half of
        # \r\n.
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
        """Split `data` like `feed`, but yield single lines."""
        for block in self.feed(data):
            yield from block.data.splitlines(keepends=True)

    def finish(self) -> Iterator[Block]:
        if self.held:
            yield Block(self.held, self.begins, ends=False)
            self.held, self.begins = b"", False

    def _may_be_long(self, lines: bytes) -> bool:
        """Return whether a line may exceed `longest`: impossible if every half of that length contains a line end."""
        half = self.longest // 2
        return any(
            lines.find(b"\n", at, at + half) < 0 and lines.find(b"\r", at, at + half) < 0
            for at in range(0, len(lines), half)
        )

    def _parts(self, line: bytes) -> Generator[Block, None, bytes]:
        """Yield parts of a line that is too long to hold, and return the rest."""
        at = 0
        while len(line) - at > self._limit(line):
            yield Block(line[at : at + self.longest], self.begins, ends=False)
            self.begins = False
            at += self.longest
        return line[at:]

    def _limit(self, line: bytes) -> int:
        whole = self.begins and self.whole and line.startswith(self.whole)
        return self.longest_whole if whole else self.longest
