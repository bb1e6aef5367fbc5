"""Marks what a rank writes with its number, so that one stream carries the output of all:

    [0]<stdout>:a line
    [1]<stderr+>:a line, or part of one, that the rank has not ended here
    [1]<news>:what the rank does, told by what stands above it

Marks stand at the beginning of a line and every line has one, so nothing that a rank writes is ever taken
for a mark. `hvdtrain.launch.running.output_parser` takes them off.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TextIO

from hvdtrain.standard_streams import write_all

LONGEST_PIECE = 900
"""Bytes; srun sends lines of up to 1024 as they are."""
_PIECE = re.compile(rb"[^\n]{0,%d}\n|[^\n]{1,%d}" % (LONGEST_PIECE - 1, LONGEST_PIECE))


def marked(data: bytes, rank: int, descriptor: int) -> bytes:
    """`data`, which `rank` wrote to standard output (1) or error (2), as marked lines of which none
    is too long."""
    name = b"stdout" if descriptor == 1 else b"stderr"
    ended, cut = b"[%d]<%s>:" % (rank, name), b"[%d]<%s+>:" % (rank, name)
    return b"".join(
        ended + piece if piece.endswith(b"\n") else b"%s%s\n" % (cut, piece)
        for piece in _PIECE.findall(data)
    )


class CurrentRank(int):
    """A worker's number when it was started, and now: in an elastic job it changes when others die or come."""

    def __new__(cls, number: int, now: Callable[[], int]) -> CurrentRank:
        rank = super().__new__(cls, number)
        rank._now = now
        return rank

    _now: Callable[[], int]

    def now(self) -> int:
        """The number that it has now; that of its start if it has lost its place."""
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
    descriptor = 1 if name == "stdout" else 2
    screen, *files = getattr(target, "_files", [target])
    while data := os.read(source.fileno(), 65536):
        # Other threads write there too, for other ranks; a buffer would mix what is larger than itself.
        number = rank.now() if isinstance(rank, CurrentRank) else rank
        for lines in atoms(marked(data, number, descriptor)):
            write_all(screen.fileno(), lines)
        for file in files:
            file.buffer.write(data)
            file.flush()
    source.close()
