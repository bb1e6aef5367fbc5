"""Frames in which the output of a rank passes through a launcher unchanged.

A frame is one line, which the launcher unpacks (`Unframer`), so lines of several ranks never mix, and a tag in front of
it (see `hvdtrain.start.parts.output_tags`) applies to all lines in it.

mpirun puts a tag in front of every line and of every piece of 4096 bytes that it reads, but has room for only 8192
bytes with the tags: of many short lines it loses the rest (a fifth of the numbers up to 200,000, printed one per line).
Also, text inside a line that looks like a tag cannot be told from one. So a helper process of each rank writes its
output in frames; a frame is at least as long as a tag, and contains no '<'.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hvdtrain.environment import TERMINAL
from hvdtrain.standard_streams import write_all

HELPER = "hvdtrain-output"
"""Name of the helper in /proc/PID/comm: it has a rank's environment, but is not a rank."""
_ESCAPE, BEGIN, _NOTHING = b"\x10", b"\x10b", b"\x10p"
# Replacing one byte by another is as fast for the shortest lines as for the longest.
_PLAIN, _STAND_INS = b"\n<", b"\x1e\x1f"
_IN, _OUT = bytes.maketrans(_PLAIN, _STAND_INS), bytes.maketrans(_STAND_INS, _PLAIN)
_ESCAPED = ((_ESCAPE, b"\x10d"), (b"\x1e", b"\x10n"), (b"\x1f", b"\x10l"))
_LEAST = 24
"""Minimum length of a frame in bytes: longer than `[1,RANK]<stdout>:`."""


def frame(data: bytes) -> bytes:
    """Return the frame for `data`."""
    return BEGIN + escaped(data) + _NOTHING * max(0, (_LEAST - len(data)) // len(_NOTHING)) + b"\n"


def escaped(data: bytes) -> bytes:
    """Return the content of a frame: `data` without newlines and '<'. Do not cut it after \\x10."""
    for plain, sequence in _ESCAPED:
        data = data.replace(plain, sequence)
    return data.translate(_IN)


@dataclass
class Unframer:
    """Unpacks the frames of one stream of one rank; passes through anything outside a frame."""

    _framed: bool | None = None  # Of the current line; None at its beginning.
    _held: bytes = b""

    @property
    def is_inside(self) -> bool:
        """Whether the bytes so far end inside a frame, or in what may be the beginning of one."""
        return bool(self._framed or self._held)

    def feed(self, data: bytes) -> bytes:
        """Return the unpacked content of `data`, the next bytes of the stream."""
        *lines, rest = (self._held + data).split(b"\n")
        self._held = b""
        parts = [self._take(line, b"\n") for line in lines]
        framed = rest.startswith(_ESCAPE) if self._framed is None else self._framed
        if framed and rest.endswith(_ESCAPE):
            rest, self._held = rest[:-1], _ESCAPE
        if rest:
            parts.append(self._take(rest, b""))
        return b"".join(parts)

    def finish(self) -> bytes:
        """Return a held-back byte that looked like the beginning of a frame, but was not."""
        held, self._held = self._held, b""
        return b"" if self._framed else held

    def _take(self, line: bytes, end: bytes) -> bytes:
        framed = line.startswith(BEGIN) if self._framed is None else self._framed
        if framed and self._framed is None:
            line = line[len(BEGIN) :]
        self._framed = None if end else framed
        if not framed:
            return line + end
        line = line.translate(_OUT)
        if _ESCAPE in line:
            for plain, sequence in ((b"", _NOTHING), *reversed(_ESCAPED)):
                line = line.replace(sequence, plain)
        return line


def frame_output(environ: Mapping[str, str]) -> None:
    """From now on, frame the output of this process and its children, if it passes through mpirun to `hvdtrain run`."""
    tagged = environ.get("OMPI_MCA_orte_tag_output") == "1"
    in_files = "OMPI_MCA_orte_output_filename" in environ
    if TERMINAL not in environ or not tagged or in_files:
        return
    try:
        rank = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # The kernel does not support it.
        return
    pipes = {number: os.pipe() for number in (1, 2)}
    first = os.fork()
    if first == 0:
        # A grandchild, because the script may wait for all of its children.
        if os.fork() == 0:
            _help(rank, {number: reading for number, (reading, _) in pipes.items()})
        os._exit(0)
    os.waitpid(first, 0)
    os.close(rank)
    for number, (reading, writing) in pipes.items():
        os.dup2(writing, number)
        os.close(reading)
        os.close(writing)


def _help(rank: int, pipes: dict[int, int]) -> NoReturn:
    """Run the helper until the rank has ended and all of its output is passed on."""
    with contextlib.suppress(BaseException):
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(HELPER)
        _close_all_but({1, 2, rank, *pipes.values()})
        for number, data in _written(rank, pipes):
            write_all(number, frame(data))
    os._exit(0)


def _written(rank: int, pipes: dict[int, int]) -> Iterator[tuple[int, bytes]]:
    """Yield (descriptor, bytes) as they arrive, until the rank ends; its children may keep the pipes open longer."""
    poll = select.poll()
    numbers = {reading: number for number, reading in pipes.items()}
    for descriptor in (rank, *numbers):
        poll.register(descriptor, select.POLLIN)
    ended = False
    while numbers:
        ready = {descriptor for descriptor, _ in poll.poll(0 if ended else None)}
        for descriptor in ready & numbers.keys():
            data = os.read(descriptor, 65536)
            if data:
                yield numbers[descriptor], data
            else:
                poll.unregister(descriptor)
                del numbers[descriptor]
        if ended and not ready:
            return
        if rank in ready:
            ended = True
            poll.unregister(rank)


def _close_all_but(kept: set[int]) -> None:
    """Close inherited descriptors: a pipe that this process keeps open would never end for its reader."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
