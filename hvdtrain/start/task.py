"""One task of srun:

    srun ... python -m hvdtrain.start.task COMMAND...

tells COMMAND its place in Horovod's words, and marks what it writes with its rank as horovodrun and
mpirun do. srun's own --label breaks unfinished lines, which progress bars are made of, and lines
that are longer than its messages.

The marks (`hvdtrain.start.marks`) stand at line starts, and no line is longer than what srun passes on
in one piece, so lines of several ranks never mix.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from hvdtrain.environment import EXIT_SIGNAL_BASE, LAUNCH_ID, TERMINAL
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.running.lookout import Lookout, as_json
from hvdtrain.launch.slurm.task import RENDEZVOUS_ADDRESS, task_environment
from hvdtrain.start.host_watch import LOOK_SECONDS
from hvdtrain.start.marks import marked, marked_news, write_all
from hvdtrain.worker.rank_environment import available_cores

NEWS_SECONDS = 5.0
"""Of a rank that goes on as before, news come so often."""
INTERFACE = "HOROVOD_GLOO_IFACE"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    # Slurm signals all processes of a task: this one stays, to pass on what the command then says.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        place = task_environment(os.environ, available_cores())
    except HvdtrainError as error:
        sys.exit(f"Error: {error}")
    environment = {**os.environ, **place}
    if RENDEZVOUS_ADDRESS in environment and INTERFACE not in environment:
        interface = interface_to(environment[RENDEZVOUS_ADDRESS])
        environment |= {INTERFACE: interface} if interface else {}
    sys.exit(run_marked(sys.argv[1:], environment, int(place["HOROVOD_RANK"])))


def run_marked(argv: list[str], environment: dict[str, str], rank: int) -> int:
    """Run the command and pass its output on with marks. Returns its exit code."""
    process = subprocess.Popen(
        argv,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_default_signals,
    )
    told = _RankNews(rank, environment)
    assert process.stdout is not None and process.stderr is not None
    with selectors.DefaultSelector() as selector:
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ, number)
        # A process that the rank left behind may keep the pipes open: its end is enough.
        while selector.get_map():
            ready = selector.select(timeout=0.1)
            told.tick()
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if data:
                    write_all(key.data, marked(data, rank, key.data))
                else:
                    selector.unregister(key.fileobj)
            if not ready and process.poll() is not None:
                break
    code = process.wait()
    told.tick(at_once=True)
    return code if code >= 0 else EXIT_SIGNAL_BASE - code


class _RankNews:
    """Tells `hvdtrain run`, if that launched it, what the rank does: at once what is new, else every few seconds."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self._rank = rank
        self._host = environment.get("SLURMD_NODENAME", "")
        wanted = TERMINAL in environment and LAUNCH_ID in environment
        self._lookout = Lookout(environment[LAUNCH_ID]) if wanted else None
        self._looked = self._told = float("-inf")
        self._before: tuple[str, str] | None = None

    def tick(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._lookout is None or (now - self._looked < LOOK_SECONDS and not at_once):
            return
        self._looked = now
        for one in self._lookout.look():
            new = self._before != (one.state, one.phase) or now - self._told >= NEWS_SECONDS
            if one.rank == self._rank and new:
                self._told, self._before = now, (one.state, one.phase)
                news = json.dumps({"ranks": as_json([replace(one, host=self._host)])})
                write_all(1, marked_news(news, self._rank))


def interface_to(address: str) -> str | None:
    """The network interface that reaches an IPv4 address; None if none has the route's address."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Sends nothing: it asks the kernel for the route.
        ours = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == ours for one in addresses):
            return name
    return None


def _default_signals() -> None:
    """In the command, signals end the process again, as usual.

    Except SIGUSR1, the warning of a job that will end, and SIGUSR2, which shows stacks: until the rank listens for
    them, they are lost and not deadly.
    """
    for number in set(_SIGNALS) - {signal.SIGUSR1, signal.SIGUSR2}:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
