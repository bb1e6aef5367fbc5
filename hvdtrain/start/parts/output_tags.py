"""Mark the output of each rank with its number, so that one stream carries the output of all:

    [0]<stdout>:a frame, with many lines or a part of one (see `hvdtrain.worker.output_frames`)
    [1]<news>:the state of the rank, reported by the process that started it

Each mark begins a line, so nothing that a rank writes is ever taken for a mark. `hvdtrain.launch.running.output_parser`
removes them. If a user runs such a command by hand, marks are put in front of plain lines, as by horovodrun.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TextIO

from hvdtrain.environment import TERMINAL
from hvdtrain.standard_streams import write_all
from hvdtrain.worker.output_frames import BEGIN, escaped

LONGEST_PIECE = 900
"""Maximum bytes of a piece for srun, which forwards lines of up to 1024 bytes unbroken."""
LONGEST_ATOM = select.PIPE_BUF - 64
"""Maximum bytes of a piece that, with its mark, is written to a pipe atomically."""
Mark = Callable[[bytes, int, int, int], bytes]


def mark_for(environ: Mapping[str, str]) -> Mark:
    """Return `marked` or `marked_lines`, depending on who reads the output."""
    return marked if TERMINAL in environ else marked_lines


def marked(data: bytes, rank: int, descriptor: int, longest: int = LONGEST_PIECE) -> bytes:
    """Format output for `hvdtrain run`, in marked frames.

    Args:
        data: Output of the rank.
        rank: Number of the rank.
        descriptor: 1 for standard output, 2 for standard error.
        longest: Maximum bytes of a frame.
    """
    mark = _mark(rank, descriptor) + BEGIN
    pieces = re.findall(rb"(?s).{1,%d}(?<!\x10)" % longest, escaped(data))
    return b"".join([b"%s%s\n" % (mark, piece) for piece in pieces])


def marked_lines(data: bytes, rank: int, descriptor: int, longest: int = LONGEST_PIECE) -> bytes:
    """Format output like `marked`, but in marked lines, for people to read."""
    mark = _mark(rank, descriptor)
    pieces = re.findall(rb"[^\n]{1,%d}\n?|\n" % longest, data)
    return b"".join([b"%s%s\n" % (mark, piece.rstrip(b"\n")) for piece in pieces])


def _mark(rank: int, descriptor: int) -> bytes:
    return b"[%d]<%s>:" % (rank, b"stdout" if descriptor == 1 else b"stderr")


class CurrentRank(int):
    """A worker's rank at its start and now: in an elastic job, it changes when workers leave or join."""

    def __new__(cls, number: int, now: Callable[[], int]) -> CurrentRank:
        rank = super().__new__(cls, number)
        rank._now = now
        return rank

    _now: Callable[[], int]

    def now(self) -> int:
        """Return the current rank, or the initial one if the worker has lost its assignment."""
        now = self._now()
        return now if now >= 0 else int(self)


def marked_news(text: str, rank: int) -> bytes:
    """Format a line of news about a rank, which must be short enough for srun."""
    return b"[%d]<news>:%s\n" % (rank, text.encode())


def say(text: str) -> None:
    """Show a message at once. Other unmarked output of a launcher is shown only if the job fails."""
    mark = marked_lines(f"hvdtrain: {text}\n".encode(errors="backslashreplace"), 0, 2)
    sys.stderr.buffer.write(mark)
    sys.stderr.buffer.flush()


def tell(text: str) -> None:
    """Print a message of the launcher itself, which is shown if the job fails, or at once by hand."""
    with suppress(OSError):  # It may have no reader any more.
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def atoms(lines: bytes) -> Iterator[bytes]:
    """Split marked lines into parts that are each written to a pipe atomically."""
    start = 0
    while len(lines) - start > select.PIPE_BUF:
        end = lines.rindex(b"\n", start, start + select.PIPE_BUF) + 1
        yield lines[start:end]
        start = end
    yield lines[start:]


def pass_on_marked(source: Connection, target: TextIO, name: str, rank: int) -> None:
    """Copy everything from `source` to `target` with marks, whatever its bytes and line lengths.

    Replaces Horovod's `prefix_connection`. With horovodrun's `--output-filename`, `target` also includes files, which
    get the rank's bytes unchanged.
    """
    descriptor, mark = 1 if name == "stdout" else 2, mark_for(os.environ)
    screen, *files = getattr(target, "_files", [target])
    in_turns = isinstance(rank, CurrentRank) and mark is marked
    for data in _until_its_end(source, ends_line=in_turns):
        # Other threads write there for other ranks; a buffer would interleave data larger than itself.
        number = rank.now() if isinstance(rank, CurrentRank) else rank
        for lines in atoms(mark(data, number, descriptor, LONGEST_ATOM)):
            write_all(screen.fileno(), lines)
        for file in files:
            file.buffer.write(data)
            file.flush()
    source.close()


def _until_its_end(source: Connection, *, ends_line: bool) -> Iterator[bytes]:
    """Yield the data, and with `ends_line` a missing final line end, as another worker may write after it."""
    data = b"\n"
    while more := os.read(source.fileno(), 65536):
        yield (data := more)
    if ends_line and not data.endswith(b"\n"):
        yield b"\n"
