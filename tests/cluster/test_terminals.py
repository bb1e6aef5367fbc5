"""A run in a terminal with job control: Ctrl-Z halts it, `fg` resumes it, and it ends with the terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import RANK, SECONDS, user_environment

SCRIPT = (
    RANK + "open(f'started.{rank}', 'w').close()\n"
    "while not os.path.exists('stop'):\n    time.sleep(0.05)\nprint('stopped', flush=True)\n"
)
HALT_SECONDS = 6.0
"""Longer than the run's own limit for ranks that hang, and than the pause by which it knows that it was halted."""


@dataclass(frozen=True)
class Shell:
    """An interactive shell on a terminal of its own."""

    pid: int
    terminal: int
    folder: Path
    mark: str

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, pattern: str) -> str:
        """What the terminal shows until there is `pattern` in it."""
        shown = ""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, shown):
            assert time.monotonic() < deadline, shown
            if select.select([self.terminal], [], [], 0.1)[0]:
                shown += os.read(self.terminal, 65536).decode(errors="replace")
        return shown

    def run(self, controller: str) -> None:
        """Start a launch, and wait for its ranks."""
        words = [
            sys.executable,
            "-m",
            "hvdtrain.cli",
            "run",
            "-np",
            "2",
            "--controller",
            controller,
        ]
        self.type(shlex.join([*words, "--hang-timeout", "3", "train.py"]) + "\n")
        deadline = time.monotonic() + SECONDS
        while len(list(self.folder.glob("started.*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(self.left()) >= 4

    def left(self) -> list[str]:
        """The processes of the launch that still exist."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = (entry / "environ").read_bytes()
                line = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if self.mark.encode() in environ and int(entry.name) != self.pid:
                found.append(line)
        return found

    def nothing_is_left(self) -> bool:
        deadline = time.monotonic() + 15
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.left() == []


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    (tmp_path / "train.py").write_text(SCRIPT)
    mark = f"terminal-{os.getpid()}-{time.monotonic_ns()}"
    environ = user_environment(JOB_OF_TEST=mark, HISTFILE="/dev/null", PS1="$ ")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(bash, [bash, "--norc", "--noprofile", "-i"], environ)
    one = Shell(pid, terminal, tmp_path, mark)
    yield one
    for ending in (signal.SIGCONT, signal.SIGKILL):
        os.kill(pid, ending)
    os.waitpid(pid, 0)


def test_ctrl_z_and_fg(shell: Shell) -> None:
    """A halt that is longer than --hang-timeout is no hang."""
    shell.run("mpi")
    shell.type("\x1a")
    shell.read_until(r"\[1\]\+ +Stopped")
    time.sleep(HALT_SECONDS)
    shell.type("fg; echo code=$?\n")
    time.sleep(2)
    (shell.folder / "stop").touch()
    shown = shell.read_until(r"code=\d+\r?\n")
    assert "code=0" in shown and "stopped\r\n" in shown, shown
    assert shell.nothing_is_left()


@pytest.mark.parametrize("halted", [False, True])
def test_a_terminal_that_is_closed_ends_the_run(
    shell: Shell, controller: str, halted: bool
) -> None:
    shell.run(controller)
    if halted:
        shell.type("\x1a")
        shell.read_until(r"\[1\]\+ +Stopped")
    os.close(shell.terminal)
    assert shell.nothing_is_left(), shell.left()
