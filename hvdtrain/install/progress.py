"""A long command: everything it prints goes to a log, the terminal sees one moving line."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hvdtrain.errors import HvdtrainError

LINE_SECONDS = 15.0
"""How often a line is printed where there is no terminal, in a log of CI for example."""

_TICK_SECONDS = 0.25
_PERCENT = re.compile(rb"\[ *(\d{1,3})%\]")
_ERROR = re.compile(
    r"\berror: (?!subprocess-exited)|CMake Error|\*\*\*.*Error|undefined reference|No space left|Killed"
)


class CommandFailed(HvdtrainError):
    """A step of the installation failed; the message has the end of its log."""


class ProgressLine:
    """`label  67 %  1m12s`: rewritten in place on a terminal, printed now and then elsewhere."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stdout
        self._moves = self._stream.isatty()
        self._start = time.monotonic()
        self._last_line = self._start
        self.update(None)

    def update(self, percent: int | None) -> None:
        now = time.monotonic()
        done = "" if percent is None else f"  {percent} %"
        text = f"{self._label}{done}  {elapsed(now - self._start)}"
        if self._moves:
            self._write(f"\r\033[K{text}")
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._write(f"{text}\n")

    def finish(self, result: str) -> None:
        clear = "\r\033[K" if self._moves else ""
        self._write(f"{clear}{self._label}: {result} ({elapsed(time.monotonic() - self._start)})\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def elapsed(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def last_percent(output: bytes) -> int | None:
    """The last `[ 67%]` that make printed."""
    found = _PERCENT.findall(output)
    return int(found[-1]) if found else None


def excerpt(log: str, errors: int = 4, tail: int = 12) -> str:
    """What a user wants of a failed build's log: the first errors with two lines after each, then the end."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _ERROR.search(line)][:errors]
    shown = sorted({number + after for number in found for after in range(3)})
    first = [lines[number] for number in shown if number < len(lines) - tail]
    return "\n".join([*first, *(["..."] if first else []), *lines[-tail:]])


def run(
    argv: Sequence[str],
    *,
    label: str,
    log: Path,
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> str:
    """Run `argv` to its end and return what it printed, which is appended to `log` too.

    Raises CommandFailed when it exits with anything but 0, or runs longer than `timeout` seconds. Leaves no process
    behind, also when it is interrupted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    line = ProgressLine(label)
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(argv)}\n".encode())
        output.flush()
        start = output.tell()
        # A session of its own, so that the whole tree (pip, cmake, make, compilers; ranks) can be ended at once.
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            timed_out = not _watch(process, line, log, start, timeout)
        finally:
            _end(process)
    printed = _read_from(log, start).decode(errors="replace")
    if timed_out or process.returncode != 0:
        ending = "timed out" if timed_out else f"failed with exit code {process.returncode}"
        line.finish(ending)
        raise CommandFailed(f"{label}: {ending}.\n\n{excerpt(printed)}\n\nThe whole log: {log}")
    line.finish("done")
    return printed


def _watch(
    process: subprocess.Popen[bytes],
    line: ProgressLine,
    log: Path,
    start: int,
    timeout: float | None,
) -> bool:
    """Draw until the process ends. False if it was still there after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    percent: int | None = None
    while True:
        try:
            process.wait(_TICK_SECONDS)
            return True
        except subprocess.TimeoutExpired:
            fresh = _read_from(log, start)
            start += len(fresh)
            percent = last_percent(fresh) or percent
            line.update(percent)
        if deadline is not None and time.monotonic() > deadline:
            return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's session: politely first, for launchers end their ranks themselves."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()
