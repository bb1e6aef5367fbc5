"""Marks what a rank writes with its number, so that one stream carries the output of all:

    [0]<stdout>:a frame, with many lines or a part of one (see `hvdtrain.worker.output_frames`)
    [1]<news>:what the rank does, told by what stands above it

Each stands in a line of its own, so nothing that a rank writes is ever taken for a mark.
`hvdtrain.launch.running.output_parser` takes them off. Where a user runs such a command by hand, marks stand in front
of plain lines, as horovodrun writes them.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TextIO

from hvdtrain.environment import TERMINAL
from hvdtrain.standard_streams import write_all
from hvdtrain.worker.output_frames import BEGIN, escaped

LONGEST_PIECE = 900
"""Bytes; srun sends lines of up to 1024 as they are."""
LONGEST_ATOM = select.PIPE_BUF - 64
"""Bytes that the system writes to a pipe together with their mark, without mixing them with other writers'."""
Mark = Callable[[bytes, int, int, int], bytes]


def mark_for(environ: Mapping[str, str]) -> Mark:
    """Returns one of the two functions below, depending on who reads the output."""
    return marked if TERMINAL in environ else marked_lines


def marked(data: bytes, rank: int, descriptor: int, longest: int = LONGEST_PIECE) -> bytes:
    """For `hvdtrain run`: what `rank` wrote to standard output (1) or error (2), in marked frames of at most `longest`
    bytes."""
    mark = _mark(rank, descriptor) + BEGIN
    pieces = re.findall(rb"(?s).{1,%d}(?<!\x10)" % longest, escaped(data))
    return b"".join([b"%s%s\n" % (mark, piece) for piece in pieces])


def marked_lines(data: bytes, rank: int, descriptor: int, longest: int = LONGEST_PIECE) -> bytes:
    """The same for people: in marked lines."""
    mark = _mark(rank, descriptor)
    pieces = re.findall(rb"[^\n]{1,%d}\n?|\n" % longest, data)
    return b"".join([b"%s%s\n" % (mark, piece.rstrip(b"\n")) for piece in pieces])


def _mark(rank: int, descriptor: int) -> bytes:
    return b"[%d]<%s>:" % (rank, b"stdout" if descriptor == 1 else b"stderr")


class CurrentRank(int):
    """A worker's number when it was started, and now: in an elastic job it changes when others die or come."""

    def __new__(cls, number: int, now: Callable[[], int]) -> CurrentRank:
        rank = super().__new__(cls, number)
        rank._now = now
        return rank

    _now: Callable[[], int]

    def now(self) -> int:
        """The current number; the initial one if it has lost its place."""
        now = self._now()
        return now if now >= 0 else int(self)


def marked_news(text: str, rank: int) -> bytes:
    """A line about the rank, shorter than a piece of srun's."""
    return b"[%d]<news>:%s\n" % (rank, text.encode())


def atoms(lines: bytes) -> Iterator[bytes]:
    """Marked lines in parts that the system writes to a pipe without mixing them with other writers'."""
    start = 0
    while len(lines) - start > select.PIPE_BUF:
        end = lines.rindex(b"\n", start, start + select.PIPE_BUF) + 1
        yield lines[start:end]
        start = end
    yield lines[start:]


def pass_on_marked(source: Connection, target: TextIO, name: str, rank: int) -> None:
    """Pass on all that comes from `source`, in any bytes and lines of any length.

    Takes the place of Horovod's `prefix_connection`. Its target may be several: where horovodrun's
    `--output-filename` says, the rank's bytes go as they are.
    """
    descriptor, mark = 1 if name == "stdout" else 2, mark_for(os.environ)
    screen, *files = getattr(target, "_files", [target])
    in_turns = isinstance(rank, CurrentRank) and mark is marked
    for data in _until_its_end(source, ends_line=in_turns):
        # Other threads write there too, for other ranks; a buffer would mix what is larger than itself.
        number = rank.now() if isinstance(rank, CurrentRank) else rank
        for lines in atoms(mark(data, number, descriptor, LONGEST_ATOM)):
            write_all(screen.fileno(), lines)
        for file in files:
            file.buffer.write(data)
            file.flush()
    source.close()


def _until_its_end(source: Connection, *, ends_line: bool) -> Iterator[bytes]:
    """What comes; at last, if wanted, the end of a line that has none: another worker may write behind it."""
    data = b"\n"
    while more := os.read(source.fileno(), 65536):
        yield (data := more)
    if ends_line and not data.endswith(b"\n"):
        yield b"\n"
