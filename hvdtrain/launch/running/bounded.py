"""Run one command within a time, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvdtrain.environment import EXIT_FAILURE, LAUNCH_ID
from hvdtrain.launch.running.process import end_processes
from hvdtrain.signals import leaving_on_signals

GRACE_SECONDS = 6.0
"""`hvdtrain run` ends its ranks, on other hosts too, within 5 s of SIGTERM."""
_TICK_SECONDS = 0.1
_REST_SECONDS = 1.0
_KEPT_BYTES = 1 << 18
"""Of the beginning and of the end of what a command writes."""


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
        """The last line that says something, of standard error if there is one; else how it ended."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        if self.returncode is not None and self.returncode < 0:
            return f"ended by signal {-self.returncode}, without a word"
        return f"ended with exit code {self.returncode}, without a word"


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
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:  # No process more, no memory, an environment that is too large.
        return Ran(EXIT_FAILURE, "", f"cannot start {argv[0]}: {error.strerror}", started, 0.0)
    writer = threading.Thread(target=_write, args=(process, stdin.encode()), daemon=True)
    readers = [_Reader(process.stdout), _Reader(process.stderr)]
    try:
        for thread in (writer, *readers):
            thread.start()
        for reader in readers:
            reader.join(max(0.0, begin + limit - time.monotonic()))
        process.wait(max(0.0, begin + limit - time.monotonic()))
        in_time = not any(reader.is_alive() for reader in readers)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        _end(process, mark)
    for reader in readers:
        reader.join(_REST_SECONDS)  # A process that has shed the mark may hold the pipe for ever.
    stdout, stderr = (reader.text() for reader in readers)
    returncode = process.returncode if in_time else None
    return Ran(returncode, stdout, stderr, started, time.monotonic() - begin)


class _Reader(threading.Thread):
    """Reads a stream to its end, and keeps no more than its beginning and its end."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._stream = stream
        self._beginning = self._end = b""

    def run(self) -> None:
        with self._stream:
            while data := os.read(self._stream.fileno(), _KEPT_BYTES):
                room = _KEPT_BYTES - len(self._beginning)
                self._beginning += data[:room]
                self._end = (self._end + data[room:])[-_KEPT_BYTES:]

    def text(self) -> str:
        return (self._beginning + self._end).decode(errors="replace")


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stream:  # It may not want to read it.
        stream.write(data)


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
    deadline = time.monotonic() + GRACE_SECONDS
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


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    if process.poll() is None:
        # Politely first: launchers end their ranks on other hosts themselves.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    end_processes(mark, signal.SIGKILL)
