"""Cuts what a rank writes into lines, of any length, in bounded memory.

How the bytes arrive makes no difference to the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 16 * 1024
"""Bytes that are held back for the end of a line. A longer one comes in parts of this size."""


class Line(NamedTuple):
    """A line with its end, or a part of a long one.

    Attributes:
        begins, ends: whether the line's beginning and end are in `data`.
    """

    data: bytes
    begins: bool
    ends: bool


@dataclass
class Lines:
    """Feed it what arrives; `finish` gives the rest.

    Attributes:
        longest: of a line that is not cut.
        whole, longest_whole: the same for lines with this beginning.
    """

    longest: int = LONGEST
    whole: bytes = b""
    longest_whole: int = LONGEST
    _held: bytearray = field(default_factory=bytearray)
    _begins: bool = True

    @property
    def held(self) -> bytes:
        """What waits for the end of its line."""
        return bytes(self._held)

    @property
    def begins(self) -> bool:
        """Whether what is held is the beginning of a line."""
        return self._begins

    def feed(self, data: bytes) -> Iterator[Line]:
        if self._held.endswith(b"\r"):
            data = b"\r" + data
            del self._held[-1]
        # A carriage return (a progress bar's) is a line's end as well; at the very end of what has come it may be
        # the first half of one.
        lines = data.splitlines(keepends=True)
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            if self._held or len(line) > self.longest:
                self._held += line
                yield from self._parts()
                yield Line(self.held, self._begins, ends=True)
                self._held.clear()
            else:
                yield Line(line, self._begins, ends=True)
            self._begins = True
        self._held += rest
        yield from self._parts()

    def finish(self) -> Iterator[Line]:
        if self._held:
            yield Line(self.held, self._begins, ends=False)
            self._held.clear()
            self._begins = False

    def _parts(self) -> Iterator[Line]:
        """What is too long to be held."""
        while len(self._held) > self._limit():
            yield Line(bytes(self._held[: self.longest]), self._begins, ends=False)
            del self._held[: self.longest]
            self._begins = False

    def _limit(self) -> int:
        whole = self._begins and self.whole and self._held.startswith(self.whole)
        return self.longest_whole if whole else self.longest
