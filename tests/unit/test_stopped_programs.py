"""Programs between the launcher and its ranks that are stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.launch.running import stopped_programs
from hvdtrain.launch.running.stopped_programs import StoppedProgram, StoppedPrograms

# Each shell starts a sleep and waits for it; the second shell is a rank.
TREE = "sh -c 'sleep 600; :' & HOROVOD_RANK=0 sh -c 'sleep 600; :' & wait"


def test_a_stopped_launcher_is_named_and_a_rank_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_programs, "LOOK_SECONDS", 0.0)
    command = subprocess.Popen(["sh", "-c", TREE], start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while len(children := _children(command.pid)) < 2 or not all(map(_children, children)):
            assert time.monotonic() < deadline
        launcher, rank = children
        watch = StoppedPrograms()
        os.kill(rank, signal.SIGSTOP)
        _wait_until_stopped(rank)
        assert watch.look([command.pid]) == []
        (sleep,) = _children(launcher)
        while (
            Path(f"/proc/{sleep}/comm").read_text() != "sleep\n"
        ):  # It has a shell's name until it is one.
            assert time.monotonic() < deadline
        os.kill(sleep, signal.SIGSTOP)
        _wait_until_stopped(sleep)
        assert watch.look([command.pid]) == [StoppedProgram("sleep", sleep, 0.0)]
        time.sleep(0.3)
        (found,) = watch.look([command.pid])
        assert 0.3 <= found.held < 10
        os.kill(sleep, signal.SIGCONT)
        time.sleep(0.1)
        assert watch.look([command.pid]) == []
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()


def test_after_a_pause_of_ours_everything_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_programs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(stopped_programs, "PAUSE_SECONDS", 0.2)
    command = subprocess.Popen(["sleep", "600"])
    try:
        os.kill(command.pid, signal.SIGSTOP)
        _wait_until_stopped(command.pid)
        watch = StoppedPrograms()
        watch.look([command.pid])
        time.sleep(0.4)
        assert [one.held for one in watch.look([command.pid])] == [0.0]
    finally:
        command.kill()
        command.wait()


def test_of_python_the_module_is_named() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "http.server", "--bind", "127.0.0.1", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as server:
        try:
            os.kill(server.pid, signal.SIGSTOP)
            _wait_until_stopped(server.pid)
            assert [one.name for one in StoppedPrograms().look([server.pid])] == ["http.server"]
        finally:
            server.kill()


def test_what_is_told_of_other_hosts_stands_until_it_is_told_anew() -> None:
    watch = StoppedPrograms()
    watch.hear("b", [{"name": "orted", "pid": 9, "held": 3.0, "host": ""}])
    assert watch.look([]) == [StoppedProgram("orted", 9, 3.0, "b")]
    watch.hear("b", [])
    assert watch.look([]) == []


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
