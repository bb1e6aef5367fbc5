"""Run one command within a time, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.launch.running.process import end_processes
from hvdtrain.signals import leaving_on_signals

_GRACE_SECONDS = 6.0
"""`hvdtrain run` ends its ranks, on other hosts too, within 5 s of SIGTERM."""
_TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Ran:
    """How a command ended.

    Attributes:
        returncode: its exit code (negative: a signal); None if it was ended because its time was over.
        stdout, stderr: what it wrote.
        started, seconds: when it started (seconds since the epoch), and how long it took.
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
    def last_line(self) -> str:
        """The last line that says something, of standard error if there is one."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return ""


def run(
    argv: Sequence[str], *, limit: float, environ: Mapping[str, str], stdin: str = ""
) -> Ran | None:
    """Run `argv` for at most `limit` seconds. None if there is no such program.

    Launchers start processes in sessions of their own: all that the command started carries a mark in its environment,
    and is ended by it.
    """
    mark = f"bounded-{uuid.uuid4().hex}"
    started, begin = time.time(), time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            env={**environ, LAUNCH_ID: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        return None
    returncode: int | None
    try:
        stdout, stderr = process.communicate(stdin, limit)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        _end(process, mark)
        stdout, stderr = process.communicate()
        returncode = None
    finally:
        _end(process, mark)
    return Ran(returncode, stdout, stderr, started, time.monotonic() - begin)


@contextlib.contextmanager
def ending_commands() -> Iterator[None]:
    """On the way out, whichever it is, all commands that run are ended."""
    with leaving_on_signals():
        try:
            yield
        finally:
            end_all()


def end_all() -> None:
    """End all commands that run now: the user wants no more of them."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while children := _children():
        late = time.monotonic() > deadline
        for pid in children:
            # Each leads a session; one that ends meanwhile is waited for by the thread that started it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            return
        time.sleep(_TICK_SECONDS)


def _children() -> list[int]:
    """Ids of this process's children, whichever thread started them."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in file.read_text().split()]
    return found


def _end(process: subprocess.Popen[str], mark: str) -> None:
    if process.poll() is None:
        # Politely first: launchers end their ranks on other hosts themselves.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    end_processes(mark, signal.SIGKILL)
