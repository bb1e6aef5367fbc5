"""The supervisor's side of the agents: one on each host, as long as the launch."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.launch.host_report import HostReport, differences, late, ssh_problem
from hvdtrain.start.agent import SILENCE_SECONDS, TICK_SECONDS, Greeting
from hvdtrain.start.host_watch import GRACE_SECONDS
from hvdtrain.start.reach import Reach

BEAT_SECONDS = SILENCE_SECONDS / 6
END_SECONDS = GRACE_SECONDS + 1.5
"""Within which agents end all of the launch; the limit of a host that does not answer."""
_LONGEST_WORDS = 4096
News = tuple[str, dict[str, Any]]


class Agents:
    """The agents of a launch, by host. Use as a context manager: at its end nothing is left.

    Args:
        commands: host -> the command that runs its agent, from here.
        environ: of the commands.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        self._held = dict.fromkeys(commands, b"")
        self._words = dict.fromkeys(commands, b"")
        self._selector = selectors.DefaultSelector()
        self._processes = {
            host: subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is not for them.
            )
            for host, argv in commands.items()
        }
        for host, process in self._processes.items():
            assert process.stdout is not None and process.stderr is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, (host, "news"))
            self._selector.register(process.stderr, selectors.EVENT_READ, (host, "words"))
        self._writing = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exception: object) -> None:
        """End all; agents that take too long are left to notice it themselves."""
        self.end()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            # Its last words must have a reader, or it could not end.
            while process.poll() is None and time.monotonic() < deadline:
                for key, _ in self._selector.select(0.02):
                    if not os.read(key.fd, 65536):
                        self._selector.unregister(key.fileobj)
            if process.poll() is None:
                process.kill()
            process.wait()
        self._selector.close()

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts that have an agent."""
        return tuple(self._processes)

    def keep_alive(self) -> None:
        """Call `beat` in the background from now on.

        The supervisor may have to wait for its own reader: a terminal that is halted. Not for one that forks.
        """
        threading.Thread(target=self._beat, daemon=True).start()

    def beat(self) -> None:
        """Tell the agents that their supervisor is there: at least every BEAT_SECONDS."""
        for host in self._processes:
            self._write(host, b"\n")

    def order(self, host: str, **order: Any) -> None:
        """Tell one agent; its first order is a greeting."""
        self._write(host, json.dumps(order).encode() + b"\n")

    def order_all(self, **order: Any) -> None:
        """Tell every agent."""
        for host in self._processes:
            self.order(host, **order)

    def news(self, seconds: float) -> Iterator[News]:
        """(host, what its agent tells), of what comes within `seconds`; waits for no more than that."""
        if not self._selector.get_map():
            time.sleep(seconds)
        for key, _ in self._selector.select(seconds):
            host, what = key.data
            data = os.read(key.fd, 65536)
            if not data:
                self._selector.unregister(key.fileobj)
            elif what == "words":
                self._words[host] = (self._words[host] + data)[-_LONGEST_WORDS:]
            else:
                *lines, self._held[host] = (self._held[host] + data).split(b"\n")
                for line in lines:
                    # The shell of a host may greet, too.
                    with contextlib.suppress(ValueError):
                        news = json.loads(line)
                        if isinstance(news, dict):
                            yield host, news

    def ended(self) -> dict[str, tuple[int, str]]:
        """Hosts whose agent has ended, all whose news has been told: exit code, and what it said."""
        reading = {key.data for key in self._selector.get_map().values()}
        return {
            host: (process.returncode, self._words[host].decode(errors="replace"))
            for host, process in self._processes.items()
            if process.poll() is not None and (host, "news") not in reading
        }

    def end(self) -> None:
        """Have everything of the launch ended on all hosts; does not wait for it."""
        self._over.set()
        with self._writing:
            for process in self._processes.values():
                with contextlib.suppress(OSError):
                    if process.stdin is not None:
                        process.stdin.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self.beat()

    def _write(self, host: str, line: bytes) -> None:
        stdin = self._processes[host].stdin
        with self._writing, contextlib.suppress(OSError, ValueError):
            if stdin is not None:
                stdin.write(line)
                stdin.flush()


@dataclass(frozen=True)
class Answers:
    """What the hosts said to the greeting.

    Attributes:
        reports: of the hosts that can run their part.
        ports: host -> the ports that were found there.
        problems: host -> why it cannot run its part.
    """

    reports: Mapping[str, HostReport]
    ports: Mapping[str, Sequence[int]]
    problems: Mapping[str, str]


def greet(
    agents: Agents,
    greetings: Mapping[str, Greeting],
    own: HostReport,
    *,
    reach: Reach,
    give_up: Callable[[], bool] = lambda: False,
) -> Answers:
    """Set up every host; waits for all answers, as long as `reach` says, or until `give_up` says so.

    Args:
        greetings: one for each host of `agents`.
        own: the launcher's own report, with which all must agree.
        reach: how they are reached.
    """
    for host, greeting in greetings.items():
        agents.order(host, **asdict(greeting))
    deadline = time.monotonic() + reach.seconds
    reports: dict[str, HostReport] = {}
    ports: dict[str, list[int]] = {}
    problems: dict[str, str] = {}
    while len(reports) + len(problems) < len(greetings) and not give_up():
        for host, news in agents.news(TICK_SECONDS):
            if "report" in news:
                report = HostReport(**news["report"])
                if wrong := differences(host, report, own):
                    problems[host] = wrong
                else:
                    reports[host], ports[host] = report, news["ports"]
            elif "problem" in news:
                problems[host] = f"host {host}: {news['problem']}"
        answered = reports.keys() | problems.keys()
        for host, (code, words) in agents.ended().items():
            if host not in answered:
                problems[host] = ssh_problem(
                    host, code, words, reach.python, reach.port, reach.identity_file
                )
        if time.monotonic() > deadline:
            for host in greetings.keys() - reports.keys() - problems.keys():
                problems[host] = late(host, reach.seconds)
    return Answers(reports, ports, {host: problems[host] for host in greetings if host in problems})
