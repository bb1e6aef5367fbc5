"""How the output of a rank passes through a launcher unharmed.

What a rank writes goes in frames, which the launch takes apart (`Unframer`): a frame is one line, so that lines of
several ranks never mix and a mark in front of it (see `hvdtrain.start.parts.output_tags`) covers all lines in it.

mpirun puts a tag in front of every line and of every piece of 4096 bytes that it reads, and has room for
8192 bytes with the tags: of many short lines it loses the rest (a fifth of the numbers up to 200,000,
printed a line each). And the same text as a tag inside of a line cannot be told from one. So a helper of
each rank writes the frames there; a frame is no shorter than a tag, and has no '<'.
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
"""The helper's name in /proc/PID/comm: it has a rank's environment, but is not a rank."""
_ESCAPE, BEGIN, _NOTHING = b"\x10", b"\x10b", b"\x10p"
# One byte in place of another is as fast for the shortest lines as for the longest.
_PLAIN, _STAND_INS = b"\n<", b"\x1e\x1f"
_IN, _OUT = bytes.maketrans(_PLAIN, _STAND_INS), bytes.maketrans(_STAND_INS, _PLAIN)
_ESCAPED = ((_ESCAPE, b"\x10d"), (b"\x1e", b"\x10n"), (b"\x1f", b"\x10l"))
_LEAST = 24
"""Bytes of a frame: more than `[1,RANK]<stdout>:` has."""


def frame(data: bytes) -> bytes:
    """The frame of what a rank wrote."""
    return BEGIN + escaped(data) + _NOTHING * max(0, (_LEAST - len(data)) // len(_NOTHING)) + b"\n"


def escaped(data: bytes) -> bytes:
    """The content of a frame: `data` without line ends and '<'. Do not cut it after \\x10."""
    for plain, sequence in _ESCAPED:
        data = data.replace(plain, sequence)
    return data.translate(_IN)


@dataclass
class Unframer:
    """Unpacks the frames of one stream of one rank; anything outside a frame is passed through."""

    _framed: bool | None = None  # Of the line that has begun.
    _held: bytes = b""

    def feed(self, data: bytes) -> bytes:
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
        """What looked like the beginning of a frame, but was not."""
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
    """From now on, all that this process and its children write goes out in frames, if it goes through mpirun
    to `hvdtrain run`."""
    tagged = environ.get("OMPI_MCA_orte_tag_output") == "1"
    in_files = "OMPI_MCA_orte_output_filename" in environ
    if TERMINAL not in environ or not tagged or in_files:
        return
    try:
        rank = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # An old kernel, or none that knows this.
        return
    pipes = {number: os.pipe() for number in (1, 2)}
    first = os.fork()
    if first == 0:
        # Its child is not the script's, which may wait for all of its own.
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
    """Be the helper, until the rank has ended and all that it wrote is passed on."""
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
    """(descriptor, bytes) as they come. What a rank leaves behind may keep the pipes open: its end is
    enough."""
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
    """Pipes that this process has from the rank, and does not need, would never end for their readers."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
