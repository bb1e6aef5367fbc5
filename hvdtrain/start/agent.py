"""The one program that stands on a host as long as a launch:

    [ssh HOST | srun ...] python -m hvdtrain.start.agent LAUNCH_ID

Orders come in and news go out as lines of JSON. The first order is the greeting (`Greeting`), which brings the
environment and the secrets, so that no value stands in a command line; the answer to it is a report on this host. It
starts processes where the launch wants it to (with parameter servers), and looks after the ranks that Horovod's
launcher starts here. When its input ends or falls silent the supervisor has gone or cannot be reached: then the agent
ends everything of the launch on this host.

Orders, after the greeting: {"start": number, ...}, {"warn": number} of one process, {"warn": null} of all ranks,
{"stacks": true}, {"signal": number}. News: {"report": ..., "ports": [...]}, {"problem": text},
{"output": [number, descriptor, text]}, {"ended": [number, exit code]}, {"ranks": [...]} once a second, and after a
signal with {"passed_on": number}; {"left": [names]} of what scripts have left behind, and the agent has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.environment import LAUNCH_ID
from hvdtrain.launch.host_report import HostReport
from hvdtrain.launch.running.lookout import as_json
from hvdtrain.launch.running.process import end_processes, processes_of
from hvdtrain.launch.running.ranks import mpi_daemons_of
from hvdtrain.launch.strategies.devices import visible_gpus
from hvdtrain.launch.strategies.roles import host_environment
from hvdtrain.rank_variables import without_place
from hvdtrain.start.host_processes import HostProcesses
from hvdtrain.start.host_watch import GRACE_SECONDS, HostWatch
from hvdtrain.worker.delivery import deliver, withdraw
from hvdtrain.worker.rank_environment import available_cores

SILENCE_SECONDS = 30.0
"""The longest silence of the supervisor that is taken for a slow network."""
TICK_SECONDS = 0.1
LOWEST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Greeting:
    """What the agent learns first.

    Attributes:
        folder: where processes run; it must be here too. Empty where the agent starts none.
        environ: variables to add to those that are here.
        secrets: variables for the ranks here that must not stand in a command line.
        processes: how many the agent will start, each with its share of the cores.
        workers: how many workers the whole launch has.
        ports: how many to find.
    """

    folder: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    processes: int = 0
    workers: int = 0
    ports: int = 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # Only the end of the input ends an agent.
    agent = Agent(sys.argv[1])
    try:
        agent.serve()
    except BrokenPipeError:
        pass
    finally:
        agent.end()


class Agent:
    """See the module. `serve` until the input ends, then `end`."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        # A launch on this host has its launcher, which carries the id as well, to end it.
        self._is_alone = os.environ.get(LAUNCH_ID) != launch_id
        self._selector = selectors.DefaultSelector()
        self._processes = HostProcesses(self._selector, _tell)
        self._watch = HostWatch(launch_id)
        self._greeting: Greeting | None = None
        self._gpus: tuple[str, ...] = ()
        self._held = b""

    def serve(self) -> None:
        """Take orders until they end."""
        self._selector.register(0, selectors.EVENT_READ, None)
        heard = time.monotonic()
        while True:
            ready = self._selector.select(TICK_SECONDS)
            # This process may itself have waited long for a reader of its news.
            silent = all(key.data is not None for key, _ in ready)
            if silent and time.monotonic() - heard > SILENCE_SECONDS:
                return
            for key, _ in ready:
                if key.data is not None:
                    self._processes.pass_on(key)
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    return
                heard = time.monotonic()
                *lines, self._held = (self._held + data).split(b"\n")
                for line in filter(None, lines):
                    self._obey(json.loads(line))
            self._processes.tick()
            if self._is_alone:
                for statuses in self._watch.tick():
                    _tell(ranks=as_json(statuses))
                    if names := self._watch.end_left_behind():
                        _tell(left=names)

    def end(self) -> None:
        """End all of the launch on this host; at once if there is nothing."""
        self._processes.end()
        if self._is_alone:
            _end_launch(self._launch_id)
        withdraw(self._launch_id)

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case _ if self._greeting is None:
                self._greeting = Greeting(**order)
                self._settle(self._greeting)
            case {"start": int()}:
                self._start(**order)
            case {"warn": int(number)}:
                self._processes.warn(number)
            case {"warn": None}:
                self._watch.warn()
            case {"stacks": _}:
                self._watch.show_stacks()
            case {"signal": int(number)}:
                self._watch.pass_on(number)
                _tell(ranks=as_json(self._watch.look()), passed_on=number)

    def _settle(self, greeting: Greeting) -> None:
        try:
            if greeting.folder:
                os.chdir(greeting.folder)
        except OSError as error:
            _tell(
                problem=f"no folder {greeting.folder} there ({error.strerror}): it must be shared"
            )
            return
        environ = without_place({**os.environ, **greeting.environ})
        os.environ.clear()
        os.environ.update(environ)
        self._gpus = visible_gpus(os.environ)
        if greeting.secrets:
            deliver(self._launch_id, greeting.secrets)
        _tell(report=asdict(own_report()), ports=free_ports(greeting.ports))

    def _start(self, start: int, kind: Any, index: int, argv: list[str], environ: Any) -> None:
        """Start process number `start`; `index` is its number among the workers of this host."""
        assert self._greeting is not None
        environment = {**os.environ, **environ, LAUNCH_ID: self._launch_id}
        environment |= host_environment(
            environment,
            kind,
            index,
            processes=self._greeting.processes,
            workers=self._greeting.workers,
            cores=available_cores(),
            gpus=self._gpus,
        )
        self._processes.start(start, argv, environment)


def _end_launch(launch_id: str) -> None:
    """End what is left of the launch on this host, whoever started it."""
    daemons = mpi_daemons_of(launch_id)
    end_processes(launch_id, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while processes_of(launch_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    end_processes(launch_id, signal.SIGKILL)
    for pid in daemons:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens at, and from which no connection starts by itself: a process
    that is started again must find its port free."""
    first = int(_PORT_RANGE.read_text().split()[0]) if _PORT_RANGE.exists() else 32768
    last = first if first > LOWEST_PORT + 1000 else 65536
    candidates = random.SystemRandom().sample(range(LOWEST_PORT, last), last - LOWEST_PORT)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            found.append(port)
    return found


def own_report() -> HostReport:
    """What this host says about itself."""
    import psutil

    interfaces = {
        name: [one.address for one in addresses if one.family.name == "AF_INET"]
        for name, addresses in psutil.net_if_addrs().items()
    }
    origin, _, reached, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return HostReport(__version__, platform.python_version(), interfaces, reached, origin)


def _tell(**news: Any) -> None:
    data = json.dumps(news).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
