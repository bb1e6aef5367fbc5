"""An agent stays as long as its supervisor is heard of, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.start.parts import agents as agents_module
from hvdtrain.start.parts.agents import Agents
from hvdtrain.start.parts.host_agent import Greeting, free_ports

REPOSITORY = Path(__file__).parents[2]
# One that takes a second of silence for the supervisor's end.
IMPATIENT = (
    "from hvdtrain.start import agent\nfrom hvdtrain.start.parts import host_agent\n"
    "host_agent.SILENCE_SECONDS = 1.0\nagent.main()\n",
    "launch",
)
ENDLESS = [sys.executable, "-c", "import os\nwhile True: os.write(1, bytes(4096))"]


def start(folder: Path, argv: list[str]) -> Agents:
    """An agent at work in the folder."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    agents = Agents({"here": [sys.executable, "-c", *IMPATIENT]}, environ)
    agents.keep_alive()
    agents.order("here", **asdict(Greeting(str(folder), processes=1, workers=1, ports=2)))
    agents.order("here", start=0, kind="worker", index=0, argv=argv, environ={"A": "b"})
    return agents


def news_until(agents: Agents, word: str, seconds: float = 20) -> dict[str, Any]:
    """All that is told until something with this word is; of several with one word the last."""
    deadline = time.monotonic() + seconds
    told: dict[str, Any] = {}
    while word not in told:
        assert time.monotonic() < deadline, (word, agents.ended())
        for host, news in list(agents.news(0.1)):
            assert host == "here"
            told |= news
    return told


def running_in(folder: Path) -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                yield (entry / "cmdline").read_text()
        except OSError:
            continue


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "BEAT_SECONDS", 0.2)
    # A host that is too slow is abandoned: its ssh is killed here, and the agent there goes on to end the launch. In
    # these tests the agent itself would be killed before it has.
    monkeypatch.setattr(agents_module, "END_SECONDS", 25)


def test_a_supervisor_that_nobody_reads_is_still_there(tmp_path: Path) -> None:
    """While a terminal is halted nobody reads, and nothing may end for it."""
    with start(tmp_path, ENDLESS) as agents:
        report = news_until(agents, "report")
        assert len(set(report["ports"])) == 2
        time.sleep(2.5)
        assert agents.ended() == {}
        for _ in range(200):
            assert not any("ended" in news for _, news in agents.news(0.01))
        assert agents._processes["here"].poll() is None
    assert not any(running_in(tmp_path))


def test_a_silent_supervisor_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "BEAT_SECONDS", 600)
    with start(tmp_path, ["sleep", "600"]) as agents:
        news_until(agents, "report")
        deadline = time.monotonic() + 10
        while not agents.ended() and time.monotonic() < deadline:
            list(agents.news(0.1))
        assert agents.ended()["here"][0] == 0
        assert not any(running_in(tmp_path))


def test_output_of_any_bytes_comes_before_the_end(tmp_path: Path) -> None:
    script = "import os\nfor _ in range(4096): os.write(1, bytes(range(256)))\nos._exit(3)\n"
    said, code = "", None
    with start(tmp_path, [sys.executable, "-c", script]) as agents:
        while code is None and not agents.ended():
            for _, news in agents.news(0.1):
                match news:
                    case {"output": [0, 1, str(text)]}:
                        said += text
                    case {"ended": [0, int(code)]}:
                        pass
    assert agents._processes["here"].returncode == 0, "it ended by itself"
    assert (said, code) == (bytes(range(256)).decode("latin-1") * 4096, 3)


def test_a_process_that_left_another_behind(tmp_path: Path) -> None:
    """It holds the output open, and is ended too: long before it would end by itself."""
    with start(tmp_path, ["sh", "-c", "sleep 600 & exit 4"]) as agents:
        asked = time.monotonic()
        assert news_until(agents, "ended")["ended"] == [0, 4]
        assert time.monotonic() - asked < 30
        while any("sleep" in line for line in running_in(tmp_path)):
            assert time.monotonic() - asked < 30


def test_the_deaf_are_killed(tmp_path: Path) -> None:
    """Also those that a process started."""
    with start(tmp_path, ["sh", "-c", "trap '' TERM; sleep 600 & echo 1; wait"]) as agents:
        news_until(agents, "output")
        asked = time.monotonic()
    assert 1.5 < time.monotonic() - asked < 30
    while any("sleep" in line for line in running_in(tmp_path)):
        assert time.monotonic() - asked < 30


def test_an_agent_that_is_killed_takes_all_with_it(tmp_path: Path) -> None:
    with start(
        tmp_path, [sys.executable, "-c", "print(1, flush=True)\nimport time; time.sleep(600)"]
    ) as agents:
        news_until(agents, "output")
        (agent,) = agents._processes.values()
        agent.kill()
        deadline = time.monotonic() + 5
        while any(running_in(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(running_in(tmp_path))


PARENT = (
    "import subprocess, sys\n"
    "agent = [sys.executable, '-m', 'hvdtrain.start.agent', 'launch']\n"
    "process = subprocess.Popen(agent, stdin=subprocess.PIPE)\n"
    "process.stdin.write(b'{}\\n')\nprocess.stdin.flush()\n"
    "sys.stdin.read()\n"
)


def test_a_stopped_agent_ends_with_its_connection(tmp_path: Path) -> None:
    """What has started it, as sshd does, is gone."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b'{"report"')
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        os.kill(int(children.read_text()), signal.SIGSTOP)
        time.sleep(0.2)
        parent.kill()
    deadline = time.monotonic() + 10
    while left := list(running_in(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_what_cannot_start(tmp_path: Path) -> None:
    with start(tmp_path, ["./nothing"]) as agents:
        told = news_until(agents, "ended")
    assert told["output"] == [0, 2, "cannot start ./nothing: No such file or directory\n"]
    assert told["ended"] == [0, 127]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with Agents(
        {"here": [sys.executable, "-c", *IMPATIENT]}, {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ) as agents:
        agents.order("here", **asdict(Greeting(str(tmp_path / "no"), processes=1, ports=1)))
        problem = news_until(agents, "problem")["problem"]
        assert str(problem).startswith(f"no working folder {tmp_path / 'no'} there (No such file")


def test_ports_are_free_and_no_connection_takes_them() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first, last = map(int, limits)
    if first > 11_000:
        assert not [port for port in ports if first <= port <= last]
