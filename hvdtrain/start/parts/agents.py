"""The supervisor's connections to the agents, one per host for the whole launch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.launch.host_report import HostReport, differences, late, report_of, ssh_problem
from hvdtrain.launch.running.line_splitter import LONGEST_NEWS, Lines
from hvdtrain.launch.running.processes import Pipes, start
from hvdtrain.launch.running.time_limits import END_SECONDS
from hvdtrain.launch.ssh import ALIVE, BATCH, path_variables, unseen_keys, where
from hvdtrain.start.parts.host_agent import SILENCE_SECONDS, TICK_SECONDS, Greeting

CONNECT_SECONDS = 10
BEAT_SECONDS = SILENCE_SECONDS / 6
_LONGEST_WORDS = 4096
News = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class SshSettings:
    """How to reach other hosts.

    Attributes:
        python: Python interpreter on the hosts.
        path_variables: Environment variables needed to find the interpreter and its modules.
        port, identity_file: Settings for ssh. None leaves them to its configuration.
        seconds: Time limit for the reports of all hosts.
    """

    python: str
    path_variables: Mapping[str, str]
    port: int | None
    identity_file: str | None
    seconds: float


def reach_by(options: argparse.Namespace, seconds: float) -> SshSettings:
    """Return the settings in the options of a launcher, whose hosts have the Python that runs its command."""
    return SshSettings(
        python=options.command[0] if options.command else sys.executable,
        path_variables=path_variables(os.environ),
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        seconds=seconds,
    )


def agent_argv(host: str, launch_id: str, reach: SshSettings) -> list[str]:
    """Return the ssh command that runs a host's agent."""
    settings = [f"{name}={value}" for name, value in reach.path_variables.items()]
    # With exec, not below a shell, so that the end of the connection reaches it even if it is stopped.
    remote = ["exec", "env", *settings, reach.python, "-P", "-m", "hvdtrain.start.agent", launch_id]
    return [
        *("ssh", "-T", *BATCH, *ALIVE, *unseen_keys(host, reach.port, reach.identity_file)),
        *("-o", f"ConnectTimeout={max(1, int(min(CONNECT_SECONDS, reach.seconds - 1)))}"),
        *where(reach.port, reach.identity_file),
        *(host, shlex.join(remote)),
    ]


def missing_program(commands: Iterable[Sequence[str]]) -> str:
    """Return an error message if a program needed by these commands is not installed here. Empty if all are."""
    for program in sorted({command[0] for command in commands}):
        if shutil.which(program) is None:
            return (
                f"{program}, which reaches the other hosts, is not in PATH: install it (ssh: the "
                "package openssh-client), or start from a machine that has it"
            )
    return ""


class Agents:
    """The agents of a launch, by host. Use as a context manager; on exit, the launch is ended on all hosts.

    Args:
        commands: Mapping from each host to the local command that runs its agent.
        environ: Environment of the commands.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        self._lines = {host: Lines(longest=LONGEST_NEWS) for host in commands}
        self._words = dict.fromkeys(commands, b"")
        self._pipes = Pipes()
        self._processes = {host: start(argv, environ) for host, argv in commands.items()}
        for host, process in self._processes.items():
            self._pipes.add_output(process, (host, "news"), (host, "words"))
        self._writing = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exception: object) -> None:
        """End all agents. One that does not respond in time ends the launch on its host when it notices the silence."""
        self.end()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            # Its last output must be read, or it could not end.
            while process.poll() is None and time.monotonic() < deadline:
                self._pipes.read(0.02)
            if process.poll() is None:
                process.kill()
            process.wait()
        self._pipes.close()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that have an agent."""
        return tuple(self._processes)

    def keep_alive(self) -> None:
        """Call `beat` in a thread, for a supervisor that a paused terminal may block. Not for one that forks."""
        threading.Thread(target=self._beat, daemon=True).start()

    def beat(self) -> None:
        """Tell the agents that their supervisor is alive. Call at least every BEAT_SECONDS."""
        for host in self._processes:
            self._write(host, b"\n")

    def order(self, host: str, **order: Any) -> None:
        """Send an order to one agent; the first must be a greeting."""
        self._write(host, json.dumps(order).encode() + b"\n")

    def order_all(self, **order: Any) -> None:
        """Send an order to every agent."""
        for host in self._processes:
            self.order(host, **order)

    def news(self, seconds: float) -> Iterator[News]:
        """Yield (host, news) for everything that arrives within `seconds`."""
        for (host, what), data in self._pipes.read(seconds):
            if what == "words":
                self._words[host] = (self._words[host] + data)[-_LONGEST_WORDS:]
                continue
            for line in self._lines[host].lines(data):
                # A login shell may print other lines.
                with contextlib.suppress(ValueError):
                    news = json.loads(line)
                    if isinstance(news, dict):
                        yield host, news

    def ended(self) -> dict[str, tuple[int, str]]:
        """Return exit code and standard error, by host, of each agent that has ended, once all its news are read."""
        reading = self._pipes.names
        return {
            host: (process.returncode, self._words[host].decode(errors="replace"))
            for host, process in self._processes.items()
            if process.poll() is not None and (host, "news") not in reading
        }

    def end(self) -> None:
        """Tell all agents to end the launch on their hosts, without waiting."""
        self._over.set()
        with self._writing:
            for process in self._processes.values():
                with contextlib.suppress(OSError):
                    if process.stdin is not None:
                        process.stdin.close()

    def forget(self) -> None:
        """Close the pipes in a forked process: an agent ends only when every copy of its input is closed."""
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

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
    """Answers of the agents to the greeting.

    Attributes:
        reports: Report of each host that can take part.
        ports: Free ports on each of these hosts.
        problems: Reason why a host cannot take part, for each of the others.
    """

    reports: Mapping[str, HostReport]
    ports: Mapping[str, Sequence[int]]
    problems: Mapping[str, str]


def greet(
    agents: Agents,
    greetings: Mapping[str, Greeting],
    own: HostReport,
    *,
    reach: SshSettings,
    give_up: Callable[[], bool] = lambda: False,
) -> Answers:
    """Greet every host and wait for all answers, for at most `reach.seconds` or until `give_up()` is true.

    The versions of a host must be those of the launcher's own.
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
                report = report_of(news["report"])
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
