"""Whose bytes are these? Takes the output of a launcher apart by rank.

mpirun tags what its ranks write with `[1,RANK]<stdout>:`, horovodrun over Gloo with
`[RANK]<stdout>:`. mpirun tags every piece that it reads, so tags also stand inside lines, and lines
of several ranks interleave; a piece goes on to the next tag or the end of its line. What follows a
line's end without a tag is the launcher's own. Nothing but the tags is taken away, and bytes stay
bytes: a piece may end inside a character.

Tasks of srun tag themselves, line by line (see `hvdtrain.start.task`); a line that the rank has not
ended, or that was too long for srun, is tagged `[RANK]<stdout+>:`, and its end is taken away too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["stdout", "stderr"]

_TAG = re.compile(rb"\[(?:\d+,)?(\d+)\]<(stdout|stderr|stddiag)(\+?)>:")
# The beginning of a tag at the end of what has been read so far.
_TAG_BEGUN = re.compile(rb"\[(\d*|\d+,\d*|(\d+,)?\d+\](<[a-z]{0,7}\+?>?)?)\Z")


@dataclass(frozen=True)
class Piece:
    """Some bytes that rank `rank` wrote to `stream`; the launcher's own if `rank` is None."""

    rank: int | None
    stream: Stream
    data: bytes


@dataclass
class PlainReader:
    """Reads a stream that has no tags: everything in it is rank 0's."""

    stream: Stream

    def feed(self, data: bytes) -> Iterator[Piece]:
        yield Piece(0, self.stream, data)

    def finish(self) -> Iterator[Piece]:
        yield from ()


@dataclass
class TagReader:
    """Reads one of the launcher's two streams. Feed it what arrives; `finish` gives the rest."""

    stream: Stream
    _source: tuple[int | None, Stream] = field(init=False)
    _held: bytes = b""
    _end: bytes = b"\n"  # What the end of the current line is to the rank.

    def __post_init__(self) -> None:
        self._source = (None, self.stream)

    def feed(self, data: bytes) -> Iterator[Piece]:
        data = self._held + data
        begun = _TAG_BEGUN.search(data)
        cut = begun.start() if begun else len(data)
        self._held = data[cut:]
        yield from self._split(data[:cut])

    def finish(self) -> Iterator[Piece]:
        """What looked like the beginning of a tag, and was none."""
        held, self._held = self._held, b""
        yield from self._split(held)

    def _split(self, data: bytes) -> Iterator[Piece]:
        position = 0
        for tag in _TAG.finditer(data):
            yield from self._attribute(data[position : tag.start()])
            name: Stream = "stdout" if tag[2] == b"stdout" else "stderr"
            self._source = (int(tag[1]), name)
            self._end = b"" if tag[3] else b"\n"
            position = tag.end()
        yield from self._attribute(data[position:])

    def _attribute(self, data: bytes) -> Iterator[Piece]:
        """The data between two tags: up to the line's end the last tag's, then the launcher's."""
        rank, stream = self._source
        if rank is not None and b"\n" in data:
            line, _, data = data.partition(b"\n")
            yield Piece(rank, stream, line + self._end)
            self._source = (None, self.stream)
        if data:
            yield Piece(*self._source, data)
