"""Implementation of `hvdtrain.start.run_parameter_servers`: a chief, workers and parameter servers on their hosts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain import __version__
from hvdtrain.environment import (
    EXIT_FAILURE,
    EXIT_HANG,
    EXIT_SIGNAL_BASE,
    GRACE_SECONDS,
    LAUNCH_ID,
    TERMINAL,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.addresses import is_this_machine
from hvdtrain.launch.env_forwarding import into_tasks, require_values, travelling
from hvdtrain.launch.host_report import THIS_HOST, HostReport
from hvdtrain.launch.hosts import Host, parse_hosts
from hvdtrain.launch.parameter_server_roles import (
    CHIEF,
    Role,
    all_roles,
    assign_hosts,
    role_environment,
)
from hvdtrain.launch.running.outcome import how_it_ended
from hvdtrain.launch.running.time_limits import START_SECONDS
from hvdtrain.launch.running.watchdog import stopped_seconds
from hvdtrain.signals import ending_signals
from hvdtrain.standard_streams import write_all
from hvdtrain.start.parts.agents import Agents, agent_argv, greet, missing_program, reach_by
from hvdtrain.start.parts.host_agent import Greeting
from hvdtrain.start.parts.host_processes import STOPPED
from hvdtrain.start.parts.output_tags import LONGEST_ATOM, mark_for, marked_lines, marked_news
from hvdtrain.start.parts.rank_watch import LOOK_SECONDS

RESTARTS = 10
PAUSE_SECONDS = 1.0
"""Pause before a worker is restarted."""
STEADY_SECONDS = 600.0
"""Lifetime of a worker after which its count of failures in a row restarts."""
CHIEF_SECONDS = 10.0
"""Time for the chief to end by itself, with its own error message, after a server has ended."""
ORDER_SECONDS = 0.5
"""Wait after the chief has failed, as the end of a server that caused it may be reported later."""
TICK_SECONDS = 0.1
LOOPBACK = "127.0.0.1"
_AGENT = "hvdtrain.start.agent"


def launch_roles(arguments: Sequence[str]) -> int:
    """Launch with these arguments, and return the exit code of the chief.

    Raises:
        HvdtrainError: The launch cannot start, here or on another host.
    """
    received = _record_signals()
    options = _options(arguments)
    launch_id = os.environ.setdefault(LAUNCH_ID, uuid.uuid4().hex)
    layout = layout_of(options)
    environ = into_tasks(os.environ, options.env) if options.srun else dict(os.environ)
    commands = _agent_commands(layout, options, launch_id)
    if missing := missing_program(commands.values()):
        raise HvdtrainError(missing)
    with Agents(commands, environ) as agents:
        agents.keep_alive()
        return Launch(layout, options, agents, received).run()


@dataclass(frozen=True)
class Layout:
    """Assignment of processes to hosts.

    Attributes:
        roles: All processes, in the order of their numbers.
        hosts: Host of each role as named by the user, or THIS_HOST if it was not.
        here: Names of this machine, whose agent needs no ssh.
    """

    roles: tuple[Role, ...]
    hosts: Mapping[Role, str]
    here: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts, without duplicates, that of the chief first."""
        return tuple(dict.fromkeys(self.hosts[role] for role in self.roles))

    def of(self, host: str) -> list[Role]:
        return [role for role in self.roles if self.hosts[role] == host]


def layout_of(options: argparse.Namespace) -> Layout:
    """Return the hosts of all processes. The chief is on this machine, or else on the first node of the job."""
    roles = all_roles(options.workers, options.ps)
    hosts: tuple[Host, ...] = parse_hosts(options.hosts) if options.hosts else ()
    if not hosts:
        return Layout(roles, dict.fromkeys(roles, THIS_HOST), frozenset({THIS_HOST}))
    names = [host.name for host in hosts]
    if options.srun:
        this_node = os.environ.get("SLURMD_NODENAME")
        here = frozenset({this_node} & set(names)) if this_node else frozenset()
        chief = next(iter(here), names[0])
    else:
        here = frozenset(name for name in names if is_this_machine(name)) | {THIS_HOST}
        chief = next((name for name in names if name in here), THIS_HOST)
    return Layout(roles, {CHIEF: chief, **assign_hosts(roles, hosts)}, here)


@dataclass
class Launch:
    """One launch, from the greeting of its agents to the exit code."""

    layout: Layout
    options: argparse.Namespace
    agents: Agents
    received: list[int]
    _addresses: dict[Role, str] = field(default_factory=dict)
    _failed: dict[Role, int] = field(default_factory=dict)
    _started: dict[Role, float] = field(default_factory=dict)
    _due: dict[Role, tuple[float, str]] = field(default_factory=dict)
    _chief_code: int | None = None
    _over_at: float | None = None
    _grace_until: float | None = None
    _look_at: float = 0.0
    _is_chief_ending: bool = True
    _lost: str = ""

    def run(self) -> int:
        if problems := self._greet():
            raise HvdtrainError("\n".join(problems))
        for role in self.layout.roles:
            self._start(role)
        while (code := self._code()) is None:
            for host, news in self.agents.news(TICK_SECONDS):
                self._hear(host, news)
            self._look_after_agents()
            self._start_again()
        return code

    @property
    def _ending(self) -> list[int]:
        """The signals received that end the launch. A warning (SIGUSR1) may arrive at any time and does not."""
        return [number for number in self.received if number != signal.SIGUSR1]

    def _code(self) -> int | None:
        """Return the exit code, or None while the launch is running."""
        while signal.SIGUSR1 in self.received:
            self.received.remove(signal.SIGUSR1)
            self.agents.order(self.layout.hosts[CHIEF], warn=0)
        now, ending = time.monotonic(), self._ending
        if self._lost:
            gone = self._chief_code is not None or ending
            return EXIT_FAILURE if gone or now > (self._over_at or now) else None
        if ending:
            return EXIT_SIGNAL_BASE + ending[0] if self._is_over(ending, now) else None
        if self._chief_code is not None:
            return self._chief_code if now >= (self._over_at or now) else None
        return None

    def _is_over(self, ending: Sequence[int], now: float) -> bool:
        """Forward the first signal to the chief, and return whether its script has handled it or its time is over.

        The servers stay, as they hold the variables that the chief may save.
        """
        host = self.layout.hosts[CHIEF]
        if self._grace_until is None:
            self._grace_until = now + float(os.environ.get(GRACE_SECONDS, 0))
            self._look_at = now + LOOK_SECONDS
            self.agents.order(host, signal=ending[0])
        elif now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self.agents.order(host, look=True)
        is_gone = self._chief_code is not None or host in self.agents.ended()
        is_done = is_gone or not self._is_chief_ending
        return is_done or len(ending) > 1 or now >= self._grace_until

    def _greet(self) -> list[str]:
        """Set up every host; return the problems, one message each."""
        asked = travelling(os.environ, self.options.env)
        answers = greet(
            self.agents,
            {host: self._greeting(host, asked) for host in self.layout.names},
            HostReport(__version__, sys.version.split()[0], {}),
            reach=reach_by(self.options, self.options.start_timeout),
            give_up=lambda: bool(self._ending),
        )
        if len(answers.reports) + len(answers.problems) < len(self.layout.names):
            sys.exit(EXIT_SIGNAL_BASE + self._ending[0])
        others = [answers.reports[h] for h in answers.reports if h not in self.layout.here]
        origin = next((report.origin for report in others if report.origin), "")
        for host in self.layout.names:
            name = host if host and not host.startswith(("127.", "localhost")) else origin
            for role, port in zip(self.layout.of(host), answers.ports.get(host, []), strict=False):
                self._addresses[role] = f"{name or LOOPBACK}:{port}"
        return list(answers.problems.values())

    def _greeting(self, host: str, asked: dict[str, str]) -> Greeting:
        roles = self.layout.of(host)
        return Greeting(
            folder=str(Path.cwd()),
            environ={} if host in self.layout.here else asked,
            processes=len(roles),
            workers=self.options.workers,
            ports=len(roles),
            still=stopped_seconds(os.environ),
        )

    def _start(self, role: Role) -> None:
        host = self.layout.hosts[role]
        command = self.options.command
        workers = [one for one in self.layout.of(host) if one.kind == "worker"]
        self._started[role] = time.monotonic()
        self.agents.order(
            host,
            start=self.layout.roles.index(role),
            kind=role.kind,
            index=workers.index(role) if role in workers else 0,
            argv=command if role == CHIEF else [command[0], "-P", "-m", "hvdtrain.start.tf_server"],
            environ=role_environment(self._addresses, role),
        )

    def _hear(self, host: str, news: Mapping[str, Any]) -> None:
        match news:
            case {"output": [int(number), int(descriptor), str(text)]}:
                data = text.encode("latin-1")
                _write(descriptor, mark_for(os.environ)(data, number, descriptor, LONGEST_ATOM))
            case {"ended": [int(number), int(code)]}:
                self._take_end(self.layout.roles[number], code)
            case {"answer": True, "ranks": [*chief]}:
                # One that has ended still has threads to wait for, and output.
                self._is_chief_ending = any(
                    one["ending"] or one["phase"] == "ended" or one["state"] == "gone"
                    for one in chief
                )
            case {"ranks": [*chief]} if chief and TERMINAL in os.environ:
                # `hvdtrain run` itself monitors a chief on its own host.
                _write(1, marked_news(json.dumps(news), 0))

    def _take_end(self, role: Role, code: int) -> None:
        now = time.monotonic()
        if role == CHIEF:
            if code == STOPPED:
                _say(f"{self._named(role)} {how_it_ended(code)}")
                code = EXIT_HANG
            self._chief_code = code
            if not self._lost:
                self._over_at = now + (ORDER_SECONDS if code else 0.0)
        elif self._ending:
            return  # Servers may get the signal, too; the chief may still save without them.
        elif role.kind == "ps":
            self._lose(
                f"{self._named(role)} {how_it_ended(code)}: the variables that it held are lost, "
                "so the run ends; what was saved before is kept"
            )
        elif self._chief_code is None and not self._lost:
            steady = now - self._started[role] > STEADY_SECONDS
            count = self._failed[role] = 1 if steady else self._failed.get(role, 0) + 1
            if count > RESTARTS:
                self._lose(
                    f"{self._named(role)} {how_it_ended(code)}, {count} times in a row: "
                    "its output is in the log folder"
                )
                return
            text = (
                f"{self._named(role)} {how_it_ended(code)}: restarting it ({count} of {RESTARTS})"
            )
            self._due[role] = (now + PAUSE_SECONDS, text)

    def _start_again(self) -> None:
        """Restart workers whose pause is over. The message comes only now because all workers end when a run does."""
        for role, (when, text) in list(self._due.items()):
            if when <= time.monotonic() and not self._ending:
                del self._due[role]
                _write(2, marked_lines(f"{text}\n".encode(), 0, 2))
                self._start(role)

    def _look_after_agents(self) -> None:
        for host, (code, words) in self.agents.ended().items():
            if self._chief_code is None and not self._ending:
                said = words.strip().rpartition("\n")[2]
                self._lose(
                    f"the connection to host {host} was lost ({said or f'exit code {code}'})"
                    if host
                    else f"the agent of this host {how_it_ended(code % 256)}"
                )
                if host == self.layout.hosts[CHIEF]:
                    self._chief_code = EXIT_FAILURE

    def _lose(self, message: str) -> None:
        """End a run that cannot continue, leaving the chief time for its own error message."""
        if self._lost:
            return
        self._lost = message
        self._due.clear()
        self._over_at = time.monotonic() + CHIEF_SECONDS
        _say(message)

    def _named(self, role: Role) -> str:
        host = self.layout.hosts[role]
        return f"{role.name} on host {host}" if len(self.layout.names) > 1 and host else role.name


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    if "--" not in arguments:
        sys.exit(
            "usage: python -m hvdtrain.start.run_parameter_servers --workers N --ps M [OPTIONS] -- COMMAND..."
        )
    at = list(arguments).index("--")
    parser = argparse.ArgumentParser(prog="hvdtrain.start.run_parameter_servers")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--ps", type=int, required=True)
    parser.add_argument("--hosts", help="NAME:SLOTS,... for workers and servers")
    parser.add_argument("--srun", action="store_true", help="the hosts are nodes of this Slurm job")
    parser.add_argument("--ssh-port", type=int)
    parser.add_argument("--ssh-identity-file")
    parser.add_argument("--start-timeout", type=int, default=START_SECONDS)
    parser.add_argument("--env", action="append", default=[], metavar="NAME")
    options = parser.parse_args(arguments[:at])
    options.command = list(arguments[at + 1 :])
    if not options.command:
        parser.error("no COMMAND for the chief")
    require_values(options.env, os.environ)
    return options


def _agent_commands(
    layout: Layout, options: argparse.Namespace, launch_id: str
) -> dict[str, list[str]]:
    """Return the command that runs the agent of each host."""
    reach = reach_by(options, options.start_timeout)
    local = [sys.executable, "-P", "-m", _AGENT, launch_id]
    commands = {}
    for host in layout.names:
        if host in layout.here:
            commands[host] = local
        elif options.srun:
            commands[host] = [*_srun(host), options.command[0], "-P", "-m", _AGENT, launch_id]
        else:
            commands[host] = agent_argv(host, launch_id, reach)
    return commands


def _srun(host: str) -> list[str]:
    """Return the srun command for one task on a node, which shares the job's resources there with other steps."""
    return [
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"),
        *("--cpu-bind=none", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0"),
    ]


def _record_signals() -> list[int]:
    """Return a list to which signals are appended from now on, instead of ending this process."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    for number in (*ending_signals(), signal.SIGUSR1):
        signal.signal(number, note)
    return received


def _say(message: str) -> None:
    for line in message.splitlines():
        _write(2, f"hvdtrain: {line}\n".encode())


def _write(descriptor: int, data: bytes) -> None:
    try:
        write_all(descriptor, data)
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)  # The output has no reader any more; the agents end everything.
