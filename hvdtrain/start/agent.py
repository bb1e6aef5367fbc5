"""Runs what a launch with parameter servers has on one host, as its supervisor says:

    [ssh HOST | srun ...] python -m hvdtrain.start.agent LAUNCH_ID

Orders come in and news go out as lines of JSON. The first order is the greeting (`Greeting`), which
brings the environment, so that no value stands in a command line; the answer to it is a report with
ports that are free here. When its input ends or falls silent the supervisor has gone or cannot be
reached: then the agent ends everything that it started. If it is killed itself, so are they.

Orders: {"start": number, ...}, {"warn": number}. News: {"report": ..., "ports": [...]},
{"output": [number, descriptor, text]}, {"ended": [number, exit code]}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.environment import EXIT_SIGNAL_BASE, LAUNCH_ID
from hvdtrain.launch.host_report import HostReport
from hvdtrain.launch.running.process import state_of
from hvdtrain.launch.strategies.devices import visible_gpus
from hvdtrain.launch.strategies.roles import host_environment
from hvdtrain.rank_variables import without_place
from hvdtrain.worker.rank_environment import available_cores

SILENCE_SECONDS = 30.0
"""The longest silence of the supervisor that is taken for a slow network."""
TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
DRAIN_SECONDS = 0.5
"""How long a process's output is waited for after its end."""
LOWEST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Greeting:
    """What the agent learns first.

    Attributes:
        folder: where the processes run; it must be here too.
        environ: variables to add to those that are here.
        processes: how many of the launch this host gets, each with its share of the cores.
        workers: how many workers the whole launch has.
        ports: how many to find.
    """

    folder: str
    environ: dict[str, str]
    processes: int
    workers: int
    ports: int


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    streams: int = 2
    ended_at: float | None = None


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


@dataclass
class Agent:
    """See the module. `serve` until the input ends, then `end`."""

    launch_id: str
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: dict[int, _Process] = field(default_factory=dict)
    _to_warn: set[int] = field(default_factory=set)
    _greeting: Greeting | None = None
    _gpus: tuple[str, ...] = ()
    _held: bytes = b""

    def serve(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, None)
        heard = time.monotonic()
        while True:
            ready = self._selector.select(TICK_SECONDS)
            # This process may itself have waited long for a reader of its news.
            silent = all(key.data is not None for key, _ in ready)
            if silent and time.monotonic() - heard > SILENCE_SECONDS:
                return
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if key.data is not None:
                    self._pass_on(key, data)
                    continue
                if not data:
                    return
                heard = time.monotonic()
                *lines, self._held = (self._held + data).split(b"\n")
                for line in filter(None, lines):
                    self._obey(json.loads(line))
            self._reap()
            self._warn()

    def end(self) -> None:
        """End all processes; their last words are lost."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(one.popen.poll() is None for one in self._running.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        """To whole process groups: also to what a script has started."""
        for one in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, number)

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._start(**order)
        elif "warn" in order:
            self._to_warn.add(order["warn"])
        elif self._greeting is None:
            self._greeting = Greeting(**order)
            self._settle(self._greeting)

    def _settle(self, greeting: Greeting) -> None:
        try:
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
        _tell(report=asdict(_own_report()), ports=free_ports(greeting.ports))

    def _start(self, start: int, kind: Any, index: int, argv: list[str], environ: Any) -> None:
        """Start process number `start`; `index` is its number among the workers of this host."""
        assert self._greeting is not None
        environment = {**os.environ, **environ, LAUNCH_ID: self.launch_id}
        environment |= host_environment(
            environment,
            kind,
            index,
            processes=self._greeting.processes,
            workers=self._greeting.workers,
            cores=available_cores(),
            gpus=self._gpus,
        )
        try:
            popen = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_prepare_child(),
            )
        except OSError as error:
            text = f"cannot start {argv[0]}: {error.strerror}\n"
            _tell(output=[start, 2, text])
            _tell(ended=[start, 127])
            return
        assert popen.stdout is not None and popen.stderr is not None
        self._running[start] = _Process(popen)
        self._selector.register(popen.stdout, selectors.EVENT_READ, (start, 1))
        self._selector.register(popen.stderr, selectors.EVENT_READ, (start, 2))

    def _pass_on(self, key: selectors.SelectorKey, data: bytes) -> None:
        number, descriptor = key.data
        if data:
            # Any bytes: as many characters.
            _tell(output=[number, descriptor, data.decode("latin-1")])
        else:
            self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        self._running[key.data[0]].streams -= 1
        key.fileobj.close()  # type: ignore[union-attr]

    def _reap(self) -> None:
        """Tell of processes that have ended, once their output is passed on."""
        now = time.monotonic()
        for number, one in list(self._running.items()):
            code = one.popen.poll()
            if code is None:
                continue
            one.ended_at = one.ended_at or now
            # What a process left behind may keep its output open.
            if one.streams and now - one.ended_at < DRAIN_SECONDS:
                continue
            for key in list(self._selector.get_map().values()):
                if key.data is not None and key.data[0] == number:
                    self._close(key)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, signal.SIGKILL)
            del self._running[number]
            _tell(ended=[number, code if code >= 0 else EXIT_SIGNAL_BASE - code])

    def _warn(self) -> None:
        """SIGUSR1 to those who are to be warned, once they listen; before that it would end them."""
        for number in list(self._to_warn):
            one = self._running.get(number)
            with contextlib.suppress(OSError):
                if one is not None and signal.SIGUSR1 in state_of(one.popen.pid).caught:
                    self._to_warn.discard(number)
                    one.popen.send_signal(signal.SIGUSR1)


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


def _own_report() -> HostReport:
    origin, _, reached, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return HostReport(__version__, platform.python_version(), {}, reached, origin)


def _prepare_child() -> Any:
    """What a new process does first: signals as usual, and an end with the agent's."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare


def _tell(**news: Any) -> None:
    data = json.dumps(news).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
