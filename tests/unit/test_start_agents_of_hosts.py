"""The agent of another host, reached by an `ssh` that stays on this one."""

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
from hvdtrain.launch.running.processes import processes_of
from hvdtrain.start.parts.agents import Agents, Answers, SshSettings, agent_argv, greet
from hvdtrain.start.parts.host_agent import Greeting, own_report
from hvdtrain.worker.secret_files import delivered

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
REACH = SshSettings(sys.executable, {"PATH": os.environ["PATH"]}, None, None, 10)


def agents_of(hosts: list[str], launch_id: str, reach: SshSettings = REACH) -> Agents:
    return Agents({host: agent_argv(host, launch_id, reach) for host in hosts}, os.environ)


def greeted(
    agents: Agents,
    own: HostReport,
    reach: SshSettings = REACH,
    secrets: dict[str, str] | None = None,
) -> Answers:
    greetings = dict.fromkeys(agents.hosts, Greeting(secrets=secrets or {}))
    return greet(agents, greetings, own, reach=reach)


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
    reach = SshSettings("/my venv/python", {"PATH": "/a b"}, 2222, "key", 5.0)
    argv = agent_argv("node1", "id", reach)
    assert argv[0] == "ssh"
    assert "BatchMode=yes" in argv and "ConnectTimeout=4" in argv
    assert argv[-6:-1] == ["-p", "2222", "-i", "key", "node1"]
    assert argv[-1] == "exec env 'PATH=/a b' '/my venv/python' -P -m hvdtrain.start.agent id"


def test_this_host_reports_itself(own: HostReport) -> None:
    assert own.interfaces["lo"] == ["127.0.0.1"]
    assert own.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")


def test_variables_come_and_go_with_the_launch(
    launch_id: str, own: HostReport, tmp_path: Path
) -> None:
    gpus = (
        tmp_path / "nvidia-smi"
    )  # It may take seconds, for what only processes of the agent's own need.
    gpus.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    gpus.chmod(0o755)
    reach = replace(REACH, path_variables={"PATH": os.environ["PATH"]})
    with agents_of(["chatty"], launch_id, reach) as agents:
        answers = greeted(agents, own, secrets={"API_KEY": "hush"})
        assert answers.problems == {}
        report = answers.reports["chatty"]
        assert (report.origin, report.reached) == ("10.0.0.1", "10.0.0.2")
        assert delivered(launch_id) == {"API_KEY": "hush"}
        assert agents.ended() == {}
    assert delivered(launch_id) == {}
    assert not (tmp_path / "asked").exists()


def test_every_problem_is_told_within_the_time(launch_id: str, own: HostReport) -> None:
    reach = replace(REACH, seconds=1.5)
    started = time.monotonic()
    with agents_of(["refused", "slow"], launch_id, reach) as agents:
        answers = greeted(agents, own, reach)
        assert time.monotonic() - started < 4
    assert answers.reports == {}
    assert list(answers.problems) == ["refused", "slow"]
    assert "no ssh server answers" in answers.problems["refused"]
    assert "host slow: no answer over ssh within 1.5 s" in answers.problems["slow"]


def test_a_python_that_is_not_there(launch_id: str, own: HostReport) -> None:
    reach = replace(REACH, python="/no/python")
    with agents_of(["a"], launch_id, reach) as agents:
        problems = greeted(agents, own, reach).problems
    assert problems["a"].startswith("host a: there is no Python at /no/python")


def test_other_versions_are_refused(launch_id: str, own: HostReport) -> None:
    with agents_of(["a"], launch_id) as agents:
        problems = greeted(agents, replace(own, hvdtrain="0.0.1")).problems
    assert "this host has 0.0.1" in problems["a"]


OTHER_VERSION = """
from hvdtrain.start import agent
from hvdtrain.start.parts import host_agent
tell = host_agent._tell
def tell_more(report=None, **news):
    tell(**news, **({"report": report | {"hvdtrain": "9.9", "news": 1}} if report else {}))
host_agent._tell = tell_more
agent.main()
"""


def test_another_version_that_tells_and_hears_more(own: HostReport) -> None:
    command = [sys.executable, "-c", OTHER_VERSION, uuid.uuid4().hex]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Agents({"a": command}, environ) as agents:
        agents.order("a", folder="", more=1)
        problems = greeted(agents, own).problems
    assert problems == {
        "a": f"host a has hvdtrain 9.9, this host has {own.hvdtrain}: install the same version on every host"
    }


def test_secrets_that_cannot_be_kept_are_a_problem_of_the_host(
    own: HostReport, tmp_path: Path
) -> None:
    code = (
        "from hvdtrain.start import agent\nfrom hvdtrain.start.parts import host_agent\n"
        "deliver = host_agent.deliver\n"
        f"host_agent.deliver = lambda *a: deliver(*a, parent=host_agent.Path({str(tmp_path / 'no')!r}))\n"
        "agent.main()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Agents({"a": [sys.executable, "-c", code, "id"]}, environ) as agents:
        problems = greeted(agents, own, secrets={"API_KEY": "hush"}).problems
    assert problems["a"].startswith("host a: cannot keep secret variables in")


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
        with agents_of(["a"], launch_id) as agents:
            greeted(agents, own)
            agents.order_all(warn=None)
            assert rank.stdout.read(6) == b"warned"
            assert rank.poll() is None
        assert rank.wait(5) == -9
    assert processes_of(launch_id) == []


def test_a_broken_connection_is_noticed(launch_id: str) -> None:
    with agents_of(["refused"], launch_id) as agents:
        wait_until(lambda: not list(agents.news(0.05)) and "refused" in agents.ended())
        assert agents.ended()["refused"][0] == 255


def test_an_agent_that_hears_nothing_ends(launch_id: str) -> None:
    code = (
        "import sys\nfrom hvdtrain.start import agent\nfrom hvdtrain.start.parts import host_agent\n"
        "host_agent.SILENCE_SECONDS = 1.0\nsys.argv = ['agent', sys.argv[1]]\nagent.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, launch_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'{"secrets": {"A_KEY": "x"}}\n')
        process.stdin.flush()
        assert process.stdout.readline().startswith(b'{"report"')
        assert delivered(launch_id) == {"A_KEY": "x"}
        assert process.wait(10) == 0
    assert delivered(launch_id) == {}
