"""Split the output of a launcher by rank.

There are two kinds of tags; the first tag in a stream tells which kind it uses.

- hvdtrain's marks, `[RANK]<stdout>:` (see `hvdtrain.start.parts.output_tags`), with Gloo and srun, and those of other
  launchers. They appear only at the beginning of a line. In hvdtrain's, a frame follows (see
  `hvdtrain.worker.output_frames`), so the same text in a rank's output is never taken for a mark.
- mpirun's `[1,RANK]<stdout>:`, in front of every piece that mpirun reads. They may thus appear inside lines, and
  lines of several ranks interleave. Python scripts write in frames, which contain nothing like a tag. In other
  programs' output, text that looks like a tag is taken for one, except directly after a tag, as mpirun passes on no
  empty pieces.

Text after a line end without a tag is the launcher's own. Only tags and frames are removed. Data stays bytes, as a
piece may end inside a character.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hvdtrain.worker.output_frames import Unframer

Stream = Literal["stdout", "stderr", "news"]
"""Output streams of a rank. "news" comes from the process that started the rank; only with hvdtrain's marks."""
Attributed = tuple[tuple[int | None, Stream], bytes]

# Groups: rank, stream; for mpirun also the rank's own text that looks like tags.
_MARK = re.compile(rb"\n\[(\d{1,9})\]<(stdout|stderr|news)>:")
_MPI_TAG = rb"\[\d{1,9},\d{1,9}\]<(?:stdout|stderr|stddiag)>:"
_MPI = re.compile(rb"\[\d{1,9},(\d{1,9})\]<(stdout|stderr|stddiag)>:((?:%s)*)" % _MPI_TAG)
_MPI_TEXT = re.compile(rb"(?:%s)+" % _MPI_TAG)
_FIRST = re.compile(rb"\n\[\d{1,9}(,\d{1,9})?\]<(?:stdout|stderr|stddiag|news)>:")
_STREAMS: dict[bytes, Stream] = {b"stdout": "stdout", b"stderr": "stderr", b"news": "news"}
# An incomplete tag at the end of the data read so far.
_BEGUN = re.compile(rb"\[(\d{0,9}|\d{1,9},\d{0,9}|(\d{1,9},)?\d{1,9}\](<[a-z]{0,7}>?)?)\Z")
_LONGEST_TAG = len(b"[123456789,123456789]<stddiag>:")


class Piece(NamedTuple):
    """Bytes that `rank` wrote to `stream`; from the launcher itself if `rank` is None."""

    rank: int | None
    stream: Stream
    data: bytes


@dataclass
class PlainReader:
    """Reads a stream without tags: everything belongs to rank 0."""

    stream: Stream

    def feed(self, data: bytes) -> Iterator[Piece]:
        yield Piece(0, self.stream, data)

    def pause(self) -> Iterator[Piece]:
        yield from ()

    def finish(self) -> Iterator[Piece]:
        yield from ()


@dataclass
class TagReader:
    """Reads one of the launcher's two streams, incrementally.

    Pass data to `feed`. `pause` returns what need not wait when no more data comes for a moment, `finish` the rest.
    """

    stream: Stream
    _source: tuple[int | None, Stream] = field(init=False)
    _tags: re.Pattern[bytes] | None = None
    _held: bytes = b""
    _begins: bool = True  # Whether the next byte begins a line.
    _tagged: bool = False  # Whether nothing has come after the last tag.
    _frames: defaultdict[tuple[int | None, Stream], Unframer] = field(
        default_factory=lambda: defaultdict(Unframer)
    )

    def __post_init__(self) -> None:
        self._source = (None, self.stream)

    def feed(self, data: bytes) -> Iterator[Piece]:
        data = self._held + data
        begun = _BEGUN.search(data, max(0, len(data) - _LONGEST_TAG))
        cut = begun.start() if begun else len(data)
        self._held = data[cut:]
        yield from self._joined(data[:cut])

    def pause(self) -> Iterator[Piece]:
        """Release bytes that looked like the beginning of a tag but were not, such as the end of a prompt.

        Where more is certain to come, the launcher is only slow: a line begins with a tag, and a frame has an end.
        """
        if not (self._begins or self._frames[self._source].is_inside):
            yield from self._release()

    def finish(self) -> Iterator[Piece]:
        yield from self._release()
        for (rank, stream), frames in self._frames.items():
            if rest := frames.finish():
                yield Piece(rank, stream, rest)

    def _release(self) -> Iterator[Piece]:
        held, self._held = self._held, b""
        yield from self._joined(held)

    def _joined(self, data: bytes) -> Iterator[Piece]:
        """Yield the pieces of `data`, joining consecutive pieces of the same source."""
        for source, parts in itertools.groupby(self._split(data), key=lambda one: one[0]):
            joined = b"".join(part for _, part in parts)
            if source[0] is not None:
                joined = self._frames[source].feed(joined)
            if joined:
                rank, stream = source
                yield Piece(rank, stream, joined)

    def _split(self, data: bytes) -> Iterator[Attributed]:
        if not data:
            return
        # A mark must follow a line end, which may be the last byte of the previous data.
        lead = b"\n" if self._begins else b" "
        self._begins = data.endswith(b"\n")
        if self._tags is None:
            if not (first := _FIRST.search(lead + data)):
                yield self._source, data
                return
            self._tags = _MPI if first[1] else _MARK
        yield from self._split_mpi(data) if self._tags is _MPI else self._split_marks(lead, data)

    def _split_marks(self, lead: bytes, data: bytes) -> Iterator[Attributed]:
        before, *found = _MARK.split(lead + data)
        if found:
            before += b"\n"
        yield from self._attribute(before[1:])
        for at in range(0, len(found), 3):
            rank, name, text = found[at : at + 3]
            self._source = (int(rank), _STREAMS[name])
            yield from self._attribute(text if at + 3 == len(found) else text + b"\n")

    def _split_mpi(self, data: bytes) -> Iterator[Attributed]:
        own = _MPI_TEXT.match(data) if self._tagged else None
        skipped = own.end() if own else 0
        before, *found = _MPI.split(data[skipped:])
        yield from self._attribute(data[:skipped] + before)
        for at in range(0, len(found), 4):
            rank, name, own_text, text = found[at : at + 4]
            self._source = (int(rank), "stdout" if name == b"stdout" else "stderr")
            yield from self._attribute(own_text + text)
        self._tagged = not found[-1] if found else self._tagged and skipped == len(data)

    def _attribute(self, data: bytes) -> Iterator[Attributed]:
        """Yield text after a tag: up to the line end it belongs to the tag's source, the rest to the launcher."""
        if self._source[0] is not None:
            end = data.find(b"\n")
            if end >= 0:
                yield self._source, data[: end + 1]
                self._source, data = (None, self.stream), data[end + 1 :]
        if data:
            yield self._source, data
