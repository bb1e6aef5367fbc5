"""Warning the ranks of a launch: each once, and none before it is prepared."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.launch.running import rank_monitor
from hvdtrain.launch.running.rank_monitor import (
    MPI_PARAMETER,
    mpi_daemons_of,
    rank_shells_of,
    topmost,
)
from hvdtrain.start.parts import rank_watch
from hvdtrain.start.parts.rank_watch import RankWatch
from hvdtrain.worker.launcher_watch import ancestors
from hvdtrain.worker.proc_files import name_of, parse_status, stat_of, state_of

RANK = """
import os, signal, subprocess, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write("warned ")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1] + ".ready", "w").close()
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.02)
signal.signal(signal.SIGUSR1, note)
while not os.path.exists(sys.argv[1] + ".end"):
    time.sleep(0.02)
child.kill()
sys.exit(child.wait() != -9)
"""


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_status() -> None:
    text = (
        "Name:\tx:y\nState:\tT (stopped)\nPPid:\t7\n"
        "SigBlk:\t0000000000000001\nSigIgn:\t2\nSigCgt:\t0000000000004200\n"
    )
    state = parse_status(text)
    assert (state.parent, state.caught, state.stopped) == (7, {10, 15}, True)


def test_a_name_of_any_bytes() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'a\\xff) b'); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert state_of(process.pid).parent == os.getpid()
        assert stat_of(process.pid)[0] in "RS"
        assert ancestors(process.pid)[0] == os.getpid()
        assert os.fsencode(name_of(process.pid)) == b"a\xff) b"
    finally:
        process.kill()
        process.communicate()


def test_what_waits_for_the_ranks_of_this_launch() -> None:
    """Also the shell that starts a daemon of MPI, where the words are quoted, and that of a rank over Gloo."""
    launch = uuid.uuid4().hex
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    commands = {
        "daemon": [*sleep, "-mca", MPI_PARAMETER, launch],
        "shell": [*sleep, f'orted -mca {MPI_PARAMETER} "{launch}" -mca b 1'],
        "gloo": [
            *sleep,
            f"env PATH=x HVDTRAIN_LAUNCH_ID={launch} LC_ALL=C python -m hvdtrain.worker",
        ],
        "mpirun": [*sleep, "-x", f"OMPI_MCA_{MPI_PARAMETER}", "-x", launch],
        "another": [*sleep, "-mca", MPI_PARAMETER, f"{launch}2"],
    }
    running = {name: subprocess.Popen(argv) for name, argv in commands.items()}
    try:
        wanted = {running[name].pid for name in ("daemon", "shell")}
        deadline = time.monotonic() + 10
        while not wanted <= mpi_daemons_of(launch) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert mpi_daemons_of(launch) == wanted
        assert rank_shells_of(launch) == {running["gloo"].pid}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_topmost() -> None:
    assert topmost({10: 1, 11: 10, 12: 11, 20: 2}) == {10, 20}


def test_a_warning_waits_for_the_rank_and_spares_its_children(tmp_path: Path) -> None:
    mark, note = uuid.uuid4().hex, tmp_path / "note"
    environment = {**os.environ, "HVDTRAIN_LAUNCH_ID": mark, "HOROVOD_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", RANK, str(note)], env=environment) as rank:
        wait_until(Path(f"{note}.ready").exists)
        watch = RankWatch(mark)
        watch.warn()
        assert [one.pid for one in watch.look()] == [rank.pid]
        Path(f"{note}.go").touch()
        wait_until(lambda: signal.SIGUSR1 in state_of(rank.pid).caught)
        for _ in range(3):
            watch.look()
        wait_until(lambda: note.exists() and note.read_text() == "warned ")
        watch.warn()
        wait_until(lambda: note.read_text() == "warned warned ")
        Path(f"{note}.end").touch()
        assert rank.wait(20) == 0


def test_a_warning_that_stands_costs_one_search_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(rank_monitor, "processes_of", lambda mark: searches.append(mark) or [])
    watch = RankWatch("none")
    watch.warn()
    before = len(searches)
    for _ in range(50):
        for _ in watch.tick():
            pass
    assert len(searches) == before


def test_ranks_that_missed_the_signal_are_ended() -> None:
    """Also one that is stopped. One with a handler has had its signal, and may be saving."""
    mark = uuid.uuid4().hex
    handles = "import signal, time; signal.signal(signal.SIGTERM, print); print(flush=True); time.sleep(60)"
    commands = (["sleep", "60"], ["sleep", "60"], [sys.executable, "-c", handles])
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, "HVDTRAIN_LAUNCH_ID": mark, "HOROVOD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    saving = ranks[2]
    assert saving.stdout.readline() == "\n"
    ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(ranks[1].pid).stopped)
    # A forked process is `sleep` only after its exec.
    wait_until(lambda: all(name_of(one.pid) == "sleep" for one in ranks[:2]))
    RankWatch(mark).end_missed()
    assert [one.wait(20) for one in ranks[:2]] == [-signal.SIGTERM] * 2
    assert saving.poll() is None
    saving.kill()
    assert saving.communicate(timeout=20)[0] == "", "its handler was not called"


def test_one_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart two ranks may have begun with the same number; each has a place of its own."""
    monkeypatch.setattr(rank_watch, "STACKS_SECONDS", 0.2)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "HVDTRAIN_LAUNCH_ID": mark, "HOROVOD_RANK": "1"}
    environment |= {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": "a"}
    ranks = [
        subprocess.Popen(["sleep", "60"], env={**environment, "HOROVOD_LOCAL_RANK": place})
        for place in ("0", "1")
    ]
    watch = RankWatch(mark)
    wait_until(lambda: len(watch.look()) == 2)
    ranks[1].send_signal(signal.SIGSTOP)
    watch.end(ranks[1].pid)
    watch.look()
    assert ranks[1].poll() is None, "it may show its stacks first"
    wait_until(lambda: watch.look()[1].state == "gone")
    assert ranks[0].poll() is None
    for one in ranks:
        one.kill()
        one.wait()
