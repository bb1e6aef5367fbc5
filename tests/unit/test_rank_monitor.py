"""What is seen of the ranks of a host: their heartbeats as another process reads them, their states, their places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.running.processes import processes_of, signal_launch
from hvdtrain.launch.running.rank_monitor import (
    RankMonitor,
    RankStatus,
    as_json,
    from_json,
)
from hvdtrain.worker.heartbeat import (
    Heartbeat,
    beat,
    current,
    has_page_of,
    in_phase,
    long_phase,
    page_of,
)
from hvdtrain.worker.proc_files import descendants_of

REPOSITORY = Path(__file__).parents[2]


def test_statuses_travel_as_json() -> None:
    beats = Heartbeat("training", 7, "ü")
    statuses = [
        RankStatus(rank, 100 + rank, "running", 60, 0, heartbeat)
        for rank, heartbeat in enumerate((beats, None))
    ]
    assert from_json(as_json(statuses)) == statuses
    assert [one.host for one in from_json(as_json(statuses), "b")] == ["b", "b"]


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    beat("training", 41, "x" * 300)
    page = page_of(os.getpid())
    assert page is not None
    seen = page.read()
    assert (seen.phase, seen.step, seen.detail) == ("training", 41, "x" * 103)
    assert time.monotonic() - seen.since < 5
    with in_phase("saving", "weights", waiting=True):
        assert (page.read().phase, page.read().waiting, page.read().step) == ("saving", True, 41)
    with long_phase("download", minutes=2):
        assert (page.read().phase, page.read().detail, page.read().allowed) == (
            *("training", "download", 120.0),
        )
    assert page.read().allowed == 0.0
    assert page.read().since > seen.since
    child = os.fork()
    if child == 0:
        beat("ended")
        os._exit(0)
    os.waitpid(child, 0)
    assert current().phase == "training", "a forked process is not the rank"


def test_a_long_phase_takes_some_time() -> None:
    with (
        pytest.raises(UsageError, match="minutes must be positive, not -1"),
        long_phase("x", -1),
    ):
        pass


WORKER = """
import sys, time
from hvdtrain.worker.heartbeat import beat
beat("training", 3)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def launch_id() -> Iterator[str]:
    identity = uuid.uuid4().hex
    yield identity
    signal_launch(identity, signal.SIGKILL)


def start(
    launch_id: str,
    number: int,
    script: str = WORKER,
    stdin: int | None = None,
    **environment: str,
) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HVDTRAIN_LAUNCH_ID": launch_id,
        "HOROVOD_RANK": str(number),
        "HOROVOD_LOCAL_SIZE": "2",
        **environment,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdin=stdin, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_what_a_lookout_sees(launch_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = RankMonitor(launch_id)
    with (
        start(launch_id, 0) as one,
        start(launch_id, 1, "import time; print('up', flush=True); time.sleep(60)") as two,
    ):
        first, second = monitor.look()
        assert (first.rank, first.pid, first.state, first.phase) == (
            0,
            one.pid,
            "running",
            "training",
        )
        assert (second.rank, second.heartbeat) == (1, None)
        os.kill(one.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while monitor.look()[0].state != "stopped":
            assert time.monotonic() < deadline
        time.sleep(0.3)
        assert monitor.look()[0].held >= 0.3
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 100)
        assert monitor.look()[0].held == 0, (
            "this process was stopped itself, perhaps with the ranks"
        )
        monkeypatch.undo()
        one.kill()
        two.kill()
        one.wait()
        two.wait()
        assert [status.state for status in monitor.look()] == ["gone", "gone"]
        assert monitor.look()[0].phase == "training", "what it did last"


COMPUTING_BELOW = """
import subprocess, sys
from hvdtrain.worker.heartbeat import beat
beat("starting")
print("up", flush=True)
below = "import sys; sys.stdin.read(1)\\nwhile True: pass"
subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}])"])
"""


def test_a_rank_is_not_quiet_while_a_program_below_it_computes(launch_id: str) -> None:
    monitor = RankMonitor(launch_id)

    def wait(is_so: Callable[[float], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so(monitor.look()[0].quiet):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with start(launch_id, 0, COMPUTING_BELOW, stdin=subprocess.PIPE) as rank:
        assert rank.stdin is not None
        try:
            wait(lambda quiet: quiet > 1.0)
            rank.stdin.write(b"x")
            rank.stdin.flush()
            wait(lambda quiet: quiet < 0.5)
        finally:
            for pid in [*descendants_of(rank.pid), rank.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_processes_may_end_while_those_below_are_listed() -> None:
    with subprocess.Popen(["bash", "-c", "while true; do /bin/true; done"]) as forking:
        deadline = time.monotonic() + 2
        found = set()
        while time.monotonic() < deadline:
            found.update(descendants_of(forking.pid))
        forking.kill()
    assert len(found) > 10


def test_a_worker_of_an_elastic_job_has_the_number_that_it_has_now(launch_id: str) -> None:
    """And one that joins the host later is found."""
    again = WORKER.replace("time.sleep(60)", "input(); beat('script', rank=0); print(); input()")
    places = [
        {"HOROVOD_ELASTIC": "1", "HOROVOD_LOCAL_RANK": str(n), "HOROVOD_LOCAL_SIZE": "1"}
        for n in range(2)
    ]
    monitor = RankMonitor(launch_id)
    with start(launch_id, 1, again, stdin=subprocess.PIPE, **places[0]) as old:
        assert [(one.rank, one.pid) for one in monitor.look()] == [(1, old.pid)]
        assert old.stdin is not None and old.stdout is not None
        old.stdin.write(b"\n")
        old.stdin.flush()
        old.stdout.readline()
        with start(launch_id, 1, **places[1]) as new:
            found = monitor.look(search=True)
            assert [(one.rank, one.pid) for one in found] == [(0, old.pid), (1, new.pid)]
            new.kill()
        old.kill()


def test_what_a_rank_left_behind_is_not_the_rank(launch_id: str) -> None:
    forks = WORKER.replace("print", "import os\nif not os.fork():\n    time.sleep(60)\nprint")
    monitor = RankMonitor(launch_id)
    with start(launch_id, 0, forks) as process:
        assert monitor.look()[0].pid == process.pid
        process.kill()
        process.wait()
        monitor._search_at = 0.0
        assert monitor.look()[0].state == "gone"
        monitor._search_at = 0.0
        assert monitor.look()[0].state == "gone"
        with start(launch_id, 0) as again:
            monitor._search_at = 0.0
            assert [(s.pid, s.state) for s in monitor.look()] == [(again.pid, "running")]
            again.kill()


def test_a_rank_that_executes_another_program_has_left_its_heartbeat(launch_id: str) -> None:
    becomes = (
        'input(); os.execv(sys.executable, [sys.executable, "-c", "print(flush=True); input()"])'
    )
    script = WORKER.replace("time.sleep(60)", f"import os; {becomes}")
    monitor = RankMonitor(launch_id)
    with start(launch_id, 0, script, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert monitor.look()[0].phase == "training"
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert [(s.pid, s.heartbeat) for s in monitor.look()] == [(process.pid, None)]
        process.kill()
        process.wait()
        assert [(s.state, s.heartbeat) for s in monitor.look()] == [("gone", None)]


_OTHER_TITLE = """
import ctypes, os, time
from pathlib import Path
from hvdtrain.worker.heartbeat import beat

beat("script")
first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
ctypes.memset(first, 0, last - first)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_that_overwrites_its_environment_is_found() -> None:
    """As setproctitle does, to show a longer title in `ps`."""
    identity = uuid.uuid4().hex
    environ = {**os.environ, "HVDTRAIN_LAUNCH_ID": identity, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_TITLE], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert b"PATH" not in Path(f"/proc/{process.pid}/environ").read_bytes()
            assert processes_of(identity) == [process.pid]
            assert processes_of(uuid.uuid4().hex) == []
            assert has_page_of(process.pid, identity)
            page = page_of(process.pid)
            assert page is not None
            assert not has_page_of(os.getpid(), identity), "who reads it is no rank"
        finally:
            process.kill()
