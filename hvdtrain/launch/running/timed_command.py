"""Run a command with a time limit, leaving none of its processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.environment import EXIT_FAILURE, LAUNCH_ID
from hvdtrain.launch.running.processes import (
    CannotStart,
    Pipes,
    end_groups,
    signal_launch,
    start,
)
from hvdtrain.launch.running.time_limits import COMMAND_SECONDS
from hvdtrain.signals import leaving_on_signals
from hvdtrain.worker.proc_files import command_of

_TICK_SECONDS = 0.1
ANSWER_SECONDS = 20.0
"""Default time limit of `ask`: nvidia-smi takes seconds on a machine without persistence mode."""
_KEPT_BYTES = 1 << 18
"""Bytes kept of the beginning, and of the end, of a command's output."""
_KEPT_OF_ANSWER = 1 << 26
"""Bytes kept for `ask`: `scontrol show job` prints a kilobyte for every job of the cluster."""
NOT_FOUND = 127
"""Exit code of shells for a program that does not exist."""


@dataclass(frozen=True)
class CompletedCommand:
    """Result of a command.

    Attributes:
        returncode: Exit code; negative if a signal killed it, None if it exceeded the time limit.
        stdout, stderr: Output of the command.
        started: Start time, in seconds since the epoch.
        seconds: Duration of the run.
    """

    returncode: int | None
    stdout: str
    stderr: str
    started: float
    seconds: float

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    @property
    def answer(self) -> str:
        """Standard output if the command succeeded, else empty."""
        return self.stdout if self.returncode == 0 else ""

    def last_lines(self, count: int) -> str:
        """Return the last `count` lines of standard output, then those of standard error."""
        return "\n".join([*self.stdout.splitlines()[-count:], *self.stderr.splitlines()[-count:]])

    @property
    def last_line(self) -> str:
        """Last non-empty line, preferring standard error; without output, a description of how the command ended."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        if self.returncode is None:
            return f"no answer within {self.seconds:.0f} s"
        if self.returncode < 0:
            return f"ended by signal {-self.returncode}, with no output"
        return f"ended with exit code {self.returncode}, with no output"


def run(
    argv: Sequence[str],
    *,
    limit: float,
    environ: Mapping[str, str],
    stdin: str = "",
    mark: str = "",
) -> CompletedCommand | None:
    """Run `argv` for at most `limit` seconds. Returns None if there is no such program.

    Launchers start processes in sessions of their own, so everything that the command starts is found, and ended, by a
    mark in its environment (for `signal_launch`; default: one of its own).
    """
    mark = mark or new_mark()
    return _run(
        argv,
        {**environ, LAUNCH_ID: mark},
        limit,
        stdin,
        _KEPT_BYTES,
        lambda: signal_launch(mark, signal.SIGKILL),
    )


def new_mark() -> str:
    """Return a mark for the processes of a command."""
    return f"bounded-{uuid.uuid4().hex}"


def ask(
    argv: Sequence[str], *, limit: float = ANSWER_SECONDS, environ: Mapping[str, str] | None = None
) -> CompletedCommand:
    """Run a short query. The exit code is 127 if there is no such program. A job or daemon that it starts is kept."""
    environ = os.environ if environ is None else environ
    said = _run(argv, environ, limit, "", _KEPT_OF_ANSWER, lambda: None)
    return said or CompletedCommand(NOT_FOUND, "", f"{argv[0]} is not installed", time.time(), 0.0)


def _run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
    stdin: str,
    kept: int,
    end_rest: Callable[[], object],
) -> CompletedCommand | None:
    started, begin = time.time(), time.monotonic()
    try:
        # An in-memory file, as a pipe would need a thread to fill it.
        with os.fdopen(os.memfd_create("input"), "w+b") as given:
            given.write(stdin.encode())
            given.seek(0)
            process = start(argv, environ, stdin=given.fileno())
    except CannotStart as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | PermissionError):
            return None
        # Out of processes or memory, or the environment is too large.
        return CompletedCommand(EXIT_FAILURE, "", str(error), started, 0.0)
    written = {"stdout": _Kept(kept), "stderr": _Kept(kept)}
    with contextlib.closing(Pipes()) as pipes:
        pipes.add_output(process, "stdout", "stderr")
        try:
            while pipes.names and (left := begin + limit - time.monotonic()) > 0:
                for name, data in pipes.read(left):
                    written[name].add(data)
            process.wait(max(0.0, begin + limit - time.monotonic()))
            in_time = not pipes.names
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            if process.poll() is None:
                # SIGTERM first: launchers then end their ranks on other hosts.
                end_groups([process], COMMAND_SECONDS)
            end_rest()
        for name, data in pipes.rest("stdout", "stderr"):
            written[name].add(data)
    stdout, stderr = (one.text for one in written.values())
    returncode = process.returncode if in_time else None
    return CompletedCommand(returncode, stdout, stderr, started, time.monotonic() - begin)


@dataclass
class _Kept:
    """The beginning and the end of a stream, `most` bytes each."""

    most: int
    _beginning: bytearray = field(default_factory=bytearray)
    _end: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        room = self.most - len(self._beginning)
        self._beginning += data[:room]
        self._end += data[room:]
        del self._end[: -self.most]

    @property
    def text(self) -> str:
        return (self._beginning + self._end).decode(errors="replace")


@contextlib.contextmanager
def ending_commands() -> Iterator[None]:
    """End all running commands on exit, also when a signal ends the process."""
    with leaving_on_signals():
        try:
            yield
        finally:
            end_all()


def end_all() -> None:
    """End all commands that are running."""
    deadline = time.monotonic() + COMMAND_SECONDS
    while children := _children():
        late = time.monotonic() > deadline
        for pid in children:
            # It is reaped by the thread that started it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            return
        time.sleep(_TICK_SECONDS)


def _children() -> list[int]:
    """Return the IDs of this process's children that are commands, of all threads."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in file.read_text().split()]
    return [pid for pid in found if _is_command(pid)]


def _is_command(pid: int) -> bool:
    """Return whether a child leads a session, or is a copy of this process that may be about to."""
    try:
        return os.getsid(pid) == pid or command_of(pid) == command_of(os.getpid())
    except OSError:
        return False
