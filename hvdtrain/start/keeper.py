"""Keeps the part of a launch that runs on one of the other hosts.

    ssh HOST python -m hvdtrain.start.keeper LAUNCH_ID

One keeper lives on each of these hosts as long as the launch. It reads lines of JSON: first the
variables for the ranks there, then orders, and in between an empty line every few seconds. It tells
what it found (`hvdtrain.launch.host_report`) in one line. When its input ends or falls silent the
launcher has gone or cannot be reached: then the keeper ends what is left of the launch on its host,
and removes the variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Iterator

from hvdtrain import __version__
from hvdtrain.launch.host_report import HostReport
from hvdtrain.launch.running.process import end_processes, processes_of
from hvdtrain.launch.running.ranks import Warner, mpi_daemons_of
from hvdtrain.worker.delivery import deliver, withdraw

BEAT_SECONDS = 5.0
"""The launcher writes at least this often."""
SILENCE_SECONDS = 30.0
"""The longest silence that is taken for a slow network."""
TICK_SECONDS = 0.2
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""


def main() -> None:
    launch_id = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # Only the end of the input ends a keeper.
    lines = _lines(0)
    try:
        variables = json.loads(next(line for line in lines if line))
        if variables:
            deliver(launch_id, variables)
        print(own_report().to_line(), flush=True)
        warner = Warner(launch_id)
        for line in lines:
            if line and json.loads(line) == "warn":
                warner.warn()
            warner.tick()
    finally:
        _end(launch_id)
        withdraw(launch_id)


def own_report() -> HostReport:
    """What this host says about itself."""
    import psutil

    interfaces = {
        name: [one.address for one in addresses if one.family.name == "AF_INET"]
        for name, addresses in psutil.net_if_addrs().items()
    }
    origin, _, reached, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return HostReport(__version__, platform.python_version(), interfaces, reached, origin)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Each line as it comes; an empty one at every tick. Ends with the input, or its silence."""
    held = b""
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE_SECONDS:
        ready, _, _ = select.select([descriptor], [], [], TICK_SECONDS)
        if ready:
            data = os.read(descriptor, 65536)
            if not data:
                return
            heard = time.monotonic()
            *lines, held = (held + data).split(b"\n")
            yield from lines
        else:
            yield b""


def _end(launch_id: str) -> None:
    """End what is left of the launch on this host; at once if nothing is."""
    daemons = mpi_daemons_of(launch_id)
    end_processes(launch_id, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while processes_of(launch_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    end_processes(launch_id, signal.SIGKILL)
    for pid in daemons:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
