"""Implementation of `hvdtrain.start.agent` on each host of a launch. Orders and news are described there."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import signal
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from hvdtrain import __version__
from hvdtrain.environment import LAUNCH_ID
from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.host_report import HostReport
from hvdtrain.launch.parameter_server_roles import host_environment
from hvdtrain.launch.running.line_splitter import Lines
from hvdtrain.launch.running.processes import Pipes, end_launch
from hvdtrain.launch.running.rank_monitor import (
    RankStatus,
    as_json,
    mpi_daemons_of,
    rank_shells_of,
)
from hvdtrain.launch.running.stopped_programs import StoppedPrograms
from hvdtrain.launch.running.watchdog import STILL_SECONDS
from hvdtrain.rank_variables import without_rank_variables
from hvdtrain.standard_streams import write_all
from hvdtrain.start.parts.host_processes import HostProcesses
from hvdtrain.start.parts.rank_watch import RankWatch
from hvdtrain.worker.proc_files import state_of
from hvdtrain.worker.secret_files import deliver, hold, withdraw

SILENCE_SECONDS = 30.0
"""A supervisor silent for longer is gone or cut off; a shorter silence may be a slow network."""
LONGEST_ORDER = 16 << 20
"""Maximum length of an order in bytes: more than an environment can have."""
TICK_SECONDS = 0.1
LOWEST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Greeting:
    """The first order to an agent.

    Attributes:
        folder: Working folder of the processes, which must exist on this host; empty if the agent starts none.
        environ: Variables to add to the agent's environment.
        secrets: Variables for the ranks on this host that must not appear in a command line.
        processes: Number of processes that the agent will start, which share the cores.
        workers: Number of workers in the whole launch.
        ports: Number of free TCP ports to find.
        still: Seconds after which a stopped process that the agent has started is ended.
    """

    folder: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    processes: int = 0
    workers: int = 0
    ports: int = 0
    still: float = STILL_SECONDS


class Agent:
    """The agent. Call `serve`, which returns when the input ends, then `end`. See `hvdtrain.start.agent`."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        # An agent on the launcher's own host inherits the launch ID, and the launcher then ends what is left.
        self._is_alone = os.environ.get(LAUNCH_ID) != launch_id
        self._pipes = Pipes()
        self._processes = HostProcesses(self._pipes, _tell)
        self._watch = RankWatch(launch_id)
        self._starters: set[int] = set()
        self._ranks = 0
        self._stopped = StoppedPrograms()
        self._greeting: Greeting | None = None
        self._gpus: tuple[str, ...] = ()
        self._secrets: IO[bytes] | None = None
        self._orders = Lines(longest=LONGEST_ORDER)

    def serve(self) -> None:
        """Carry out orders until the input ends."""
        self._pipes.add(None, 0)
        heard = time.monotonic()
        while True:
            came = self._pipes.read(TICK_SECONDS)
            # Checked after reading, as this process may itself have been blocked by a slow reader of its news.
            silent = all(name is not None for name, _ in came)
            if silent and time.monotonic() - heard > SILENCE_SECONDS:
                return
            for name, data in came:
                if name is not None:
                    self._processes.pass_on(name, data)
                    continue
                if not data:
                    return
                heard = time.monotonic()
                for line in self._orders.lines(data):
                    if order := line.strip():
                        self._obey(json.loads(order))
            self._processes.tick()
            if self._is_alone:
                for statuses in self._watch.tick():
                    self._tell_of(statuses)

    def end(self) -> None:
        """End all processes of the launch on this host."""
        self._processes.end()
        if self._is_alone:
            daemons = mpi_daemons_of(self._launch_id)
            shells = rank_shells_of(self._launch_id)
            end_launch(self._launch_id)
            for pid in daemons | shells:
                with contextlib.suppress(OSError):
                    if pid in daemons:
                        os.kill(pid, signal.SIGTERM)
                    # A stopped daemon could not act on SIGTERM; a shell ends with its rank.
                    if state_of(pid).stopped:
                        os.kill(pid, signal.SIGCONT)
        withdraw(self._launch_id)

    def _tell_of(self, ranks: list[RankStatus], **more: bool) -> None:
        """Report the ranks, the programs that run them, and the processes that they left behind."""
        if not ranks or len(ranks) > self._ranks:  # These programs exist before their ranks.
            self._starters = mpi_daemons_of(self._launch_id) | rank_shells_of(self._launch_id)
            self._ranks = len(ranks)
        stopped = self._stopped.look(self._starters)
        _tell(
            ranks=as_json(ranks),
            stopped=[asdict(one) for one in stopped],
            left=self._watch.end_left_behind(),
            leaving=self._watch.is_left,
            **more,
        )

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case _ if self._greeting is None:
                # Another version may send more fields; it must still learn our version.
                known = {one.name for one in fields(Greeting)}
                self._greeting = Greeting(**{k: v for k, v in order.items() if k in known})
                self._processes.still = self._greeting.still
                self._settle(self._greeting)
            case {"start": int()}:
                self._start(**order)
            case {"warn": int(number)}:
                self._processes.warn(number)
            case {"warn": None}:
                self._watch.warn()
            case {"stacks": _}:
                self._watch.show_stacks()
            case {"end": int(pid)}:
                self._watch.end(pid)
            case {"signal": int(number)}:
                self._watch.pass_on(number)
                self._tell_of(self._watch.look(), answer=True)
            case {"look": _}:
                self._tell_of(self._watch.look(), answer=True)

    def _settle(self, greeting: Greeting) -> None:
        try:
            if greeting.folder:
                os.chdir(greeting.folder)
        except OSError as error:
            _tell(
                problem=f"no working folder {greeting.folder} there ({error.strerror}): every host needs it"
            )
            return
        environ = without_rank_variables({**os.environ, **greeting.environ})
        os.environ.clear()
        os.environ.update(environ)
        self._gpus = visible_gpus(os.environ) if greeting.processes else ()
        try:
            if greeting.secrets:
                self._secrets = hold(deliver(self._launch_id, greeting.secrets))
        except HvdtrainError as error:
            _tell(problem=str(error))
            return
        _tell(report=asdict(own_report()), ports=free_ports(greeting.ports))

    def _start(self, start: int, kind: Any, index: int, argv: list[str], environ: Any) -> None:
        """Start process number `start`; `index` is its index among the workers of this host."""
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


def free_ports(count: int) -> list[int]:
    """Return free TCP ports outside of the ephemeral range, so that a restarted process finds its port still free."""
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
    """Return the report on this host."""
    import psutil

    interfaces = {
        name: [one.address for one in addresses if one.family.name == "AF_INET"]
        for name, addresses in psutil.net_if_addrs().items()
    }
    origin, _, reached, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return HostReport(__version__, platform.python_version(), interfaces, reached, origin)


def _tell(**news: Any) -> None:
    write_all(1, json.dumps(news).encode() + b"\n")
