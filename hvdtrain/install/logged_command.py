"""Run a long command, with its output in a log and a progress bar on the terminal."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.running.processes import end_groups, start
from hvdtrain.launch.running.time_limits import COMMAND_SECONDS

_PERCENT = re.compile(rb"\[ *(\d{1,3})%\]")
"""Progress that make prints before each source file."""
_ERROR = re.compile(
    r"\berror: (?!subprocess-exited)|CMake Error|\*\*\*.*Error|undefined reference|No space left|Killed"
)


class CommandFailed(HvdtrainError):
    """A step of the installation failed. The message contains an excerpt of its log."""

    def __init__(self, label: str, ending: str, printed: str, log: Path) -> None:
        super().__init__(f"{label}: {ending}.\n\n{excerpt(printed)}\n\nThe whole log: {log}")


def excerpt(log: str, errors: int = 4, tail: int = 12) -> str:
    """Return the relevant parts of a failed build's log: the first errors, with two more lines each, and the end."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _ERROR.search(line)][:errors]
    shown = sorted({number + after for number in found for after in range(3)})
    first = [lines[number] for number in shown if number < len(lines) - tail]
    return "\n".join([*first, *(["..."] if first else []), *lines[-tail:]])


def run(
    argv: Sequence[str], *, label: str, log: Path, environment: Mapping[str, str] = os.environ
) -> None:
    """Run `argv` to its end, appending its output to `log`. Leaves no process behind, even if interrupted.

    Raises:
        CannotStart: The command cannot be started.
        CommandFailed: The exit code is not 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, click.progressbar(length=100, label=label) as bar:
        output.write(f"\n$ {shlex.join(argv)}\n".encode())
        output.flush()
        begun = output.tell()
        process = start(argv, environment, stdin=subprocess.DEVNULL, merge=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.write(line)
                if percent := _PERCENT.search(line):
                    bar.update(max(0, int(percent[1]) - bar.pos))
            process.wait()
        finally:
            end_groups([process], COMMAND_SECONDS)
            process.stdout.close()
        if process.returncode == 0:
            bar.update(100 - bar.pos)
    if process.returncode != 0:
        printed = log.read_bytes()[begun:].decode(errors="replace")
        raise CommandFailed(label, f"failed with exit code {process.returncode}", printed, log)
