"""Rank 0 reads what a launch is given; a launch in the background leaves the terminal alone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
READS = """
import os, sys
from hvdtrain.rank_variables import rank_of
print("ready", flush=True)
print("rank", rank_of(os.environ), "read", repr(sys.stdin.read()), flush=True)
"""
LARGE = 300_000
"""More than a pipe holds."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "reads.py"
    path.write_text(READS)
    return path


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "hvdtrain.cli", "run", *options, "--all-ranks", "reads.py"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("given", ["hello\n", ""])
def test_rank_0_reads_what_is_given(script: Path, controller: str, given: str) -> None:
    done = subprocess.run(
        command("-np", "2", "--controller", controller),
        cwd=script.parent,
        env=environment(),
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in sorted(done.stdout.splitlines()) if "read " in line]
    assert lines == [f"[0] rank 0 read {given!r}", "[1] rank 1 read ''"]


def test_all_of_a_large_input_from_a_file_arrives(script: Path) -> None:
    script.write_text("import sys; print(len(sys.stdin.read()))")
    text = script.with_name("large.txt")
    text.write_text("x" * LARGE)
    with text.open() as file:
        done = subprocess.run(
            [sys.executable, "-m", "hvdtrain.cli", "run", "-np", "1", "reads.py"],
            cwd=script.parent, env=environment(), stdin=file, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{LARGE}\n"), done.stderr


def test_without_an_input_a_launch_runs(script: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command("-np", "1")],
        cwd=script.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 read ''" in done.stdout


class Terminal:
    """A shell's terminal in which a launch runs."""

    def __init__(self, folder: Path, argv: list[str], background: bool) -> None:
        self.text = ""
        shell, self._end = pty.fork()
        if shell == 0:
            os.chdir(folder)
            job = os.fork()
            if job == 0:
                os.setpgid(0, 0)
                if not background:
                    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                    os.tcsetpgrp(0, os.getpid())
                    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
                os.execve(argv[0], argv, environment())
            # WUNTRACED: a job that is stopped counts as ended, with 99.
            _, status = os.waitpid(job, os.WUNTRACED)
            os._exit(99 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
        self.shell = shell

    def read_until(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            self.text += os.read(self._end, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def exit_code(self) -> int:
        with suppress(OSError):  # Its other end is closed.
            while data := os.read(self._end, 4096):
                self.text += data.decode()
        return os.waitstatus_to_exitcode(os.waitpid(self.shell, 0)[1])


@pytest.fixture
def terminals(script: Path) -> Iterator[list[Terminal]]:
    begun: list[Terminal] = []
    yield begun
    for one in begun:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.shell, signal.SIGKILL)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_what_is_typed_goes_to_rank_0(
    script: Path, terminals: list[Terminal], controller: str
) -> None:
    options = ["-np", "2", "--controller", controller]
    terminals.append(terminal := Terminal(script.parent, command(*options), background=False))
    terminal.read_until("ready")
    terminal.type("typed\n\x04")
    assert terminal.exit_code() == 0, terminal.text
    assert "rank 0 read 'typed\\n'" in terminal.text


def test_in_the_background_a_launch_is_not_stopped(script: Path, terminals: list[Terminal]) -> None:
    script.write_text("import time; print('ready', flush=True); time.sleep(2)")
    argv = [sys.executable, "-m", "hvdtrain.cli", "run", "-np", "1", "reads.py"]
    terminals.append(terminal := Terminal(script.parent, argv, background=True))
    terminal.read_until("ready")
    terminal.type("for the shell\n")
    assert terminal.exit_code() == 0, terminal.text
