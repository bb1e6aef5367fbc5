"""The keeper of another host, reached by an `ssh` that stays on this one."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch.host_report import HostReport
from hvdtrain.launch.running.process import processes_of
from hvdtrain.start.keeper import own_report
from hvdtrain.start.keepers import Keepers, Reach, keeper_argv
from hvdtrain.worker.delivery import delivered

# The last argument is the remote command; the one before it the host.
SSH = """#!/bin/sh
[ "$1" != -G ] || { echo "stricthostkeychecking ask"; exit; }
for argument; do host=$command; command=$argument; done
case $host in
    refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
    slow) exec sleep 60 ;;
    chatty) echo "Welcome to chatty!" ;;
esac
exec sh -c "$command"
"""
REACH = Reach(sys.executable, {"PATH": os.environ["PATH"]}, None, None, 10)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def launch_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    yield uuid.uuid4().hex


@pytest.fixture
def own() -> HostReport:
    return own_report()


def test_the_ssh_command() -> None:
    reach = Reach("/my venv/python", {"PATH": "/a b"}, 2222, "key", 5.0)
    argv = keeper_argv("node1", "id", reach)
    assert argv[0] == "ssh"
    assert "BatchMode=yes" in argv and "ConnectTimeout=4" in argv
    assert argv[-6:-1] == ["-p", "2222", "-i", "key", "node1"]
    assert argv[-1] == "env 'PATH=/a b' '/my venv/python' -P -m hvdtrain.start.keeper id"


def test_this_host_reports_itself(own: HostReport) -> None:
    assert own.interfaces["lo"] == ["127.0.0.1"]
    assert own.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")


def test_variables_come_and_go_with_the_launch(launch_id: str, own: HostReport) -> None:
    with Keepers(["chatty"], launch_id, REACH) as keepers:
        reports, problems = keepers.reports({"API_KEY": "hush"}, own)
        assert problems == []
        assert (reports["chatty"].origin, reports["chatty"].reached) == ("10.0.0.1", "10.0.0.2")
        assert delivered(launch_id) == {"API_KEY": "hush"}
        assert keepers.lost() == []
    assert delivered(launch_id) == {}


def test_every_problem_is_told_within_the_time(launch_id: str, own: HostReport) -> None:
    reach = replace(REACH, seconds=1.5)
    started = time.monotonic()
    with Keepers(["refused", "slow"], launch_id, reach) as keepers:
        reports, problems = keepers.reports({}, own)
        assert time.monotonic() - started < 4
    assert reports == {}
    assert [text.partition(": ")[0] for text in problems] == ["host refused", "host slow"]
    assert "no ssh server answers" in problems[0]
    assert "no answer over ssh within 1.5 s" in problems[1]


def test_a_python_that_is_not_there(launch_id: str, own: HostReport) -> None:
    with Keepers(["a"], launch_id, replace(REACH, python="/no/python")) as keepers:
        _, problems = keepers.reports({}, own)
    assert len(problems) == 1
    assert problems[0].startswith("host a: there is no Python at /no/python")


def test_other_versions_are_refused(launch_id: str, own: HostReport) -> None:
    with Keepers(["a"], launch_id, REACH) as keepers:
        _, problems = keepers.reports({}, replace(own, hvdtrain="0.0.1"))
    assert "this one has 0.0.1" in problems[0]


def test_what_is_left_is_ended(launch_id: str, own: HostReport) -> None:
    """Also what ignores SIGTERM; and the warning reaches ranks there."""
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'warned'))\n"
        "os.write(1, b'ready ')\n"
        "while True:\n    time.sleep(1)\n"
    )
    environment = {**os.environ, "HVDTRAIN_LAUNCH_ID": launch_id, "HOROVOD_RANK": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.read(6) == b"ready "
        with Keepers(["a"], launch_id, REACH) as keepers:
            keepers.reports({}, own)
            keepers.warn()
            assert rank.stdout.read(6) == b"warned"
            assert rank.poll() is None
        assert rank.wait(5) == -9
    assert processes_of(launch_id) == []


def test_a_broken_connection_is_noticed(launch_id: str, own: HostReport) -> None:
    with Keepers(["refused"], launch_id, REACH) as keepers:
        wait_until(lambda: keepers.lost() == ["refused"])


def test_a_keeper_that_hears_nothing_ends(launch_id: str) -> None:
    code = (
        "import sys\nfrom hvdtrain.start import keeper\n"
        "keeper.SILENCE_SECONDS = 1.0\nsys.argv = ['keeper', sys.argv[1]]\nkeeper.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, launch_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'{"A_KEY": "x"}\n')
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"{")
        assert delivered(launch_id) == {"A_KEY": "x"}
        assert process.wait(10) == 0
    assert delivered(launch_id) == {}
