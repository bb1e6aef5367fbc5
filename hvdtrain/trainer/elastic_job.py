"""A Trainer in an elastic job: when workers come or go, all others start their script again, each in its own process.

The number of workers is a constant of traced steps, shares and communicators, so all of these are made anew. From there
a worker goes on from the newest checkpoint, as a run does that was killed: one way, whatever has happened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from horovod.common.elastic import notification_manager

from hvdtrain.environment import RESUME, START_FOLDER
from hvdtrain.errors import EngineError, HvdtrainError
from hvdtrain.rank_variables import is_elastic
from hvdtrain.worker.elastic_place import place_in_job

STARTED_AGAIN = "HVDTRAIN_STARTED_AGAIN"
"""How many steps were saved when this process started its script again, and how often it has done so since then."""
MOST_STARTS = 3
"""Without a new checkpoint: what fails each time is not mended by one more."""


class WorkersChanged(HvdtrainError):
    """The number of workers is about to change. The training has saved."""


class HostChanges:
    """Listens to what the launcher of an elastic job tells of hosts.

    Attributes:
        heard: whether some have come or gone since it listens. Rank 0 alone is told.
    """

    def __init__(self) -> None:
        self.heard = False

    def on_hosts_updated(self, timestamp: float, update: Any) -> None:
        """Called by Horovod, in a thread."""
        self.heard = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In this block it listens, if this job is elastic."""
        if not is_elastic(os.environ):
            yield
            return
        # First: what happened before is told at once.
        notification_manager.register_listener(self)
        notification_manager.init()
        try:
            yield
        finally:
            notification_manager.remove_listener(self)


def start_again(error: HvdtrainError, steps: int, exists: bool) -> NoReturn:
    """Replace this process by one that runs its command anew, in the environment that its launcher gave it.

    Args:
        error: why.
        steps: as of the newest checkpoint; 0: there is none.
        exists: whether a checkpoint is known to be there.

    Raises:
        EngineError: it did so before, again and again, and no new checkpoint came of it; the launcher has gone.
        SystemExit: the job continues without this worker.
    """
    times = starts_before(os.environ, steps) + 1
    if times > MOST_STARTS:
        raise EngineError(
            f"{error} The script was restarted {MOST_STARTS} times without reaching a new checkpoint"
        ) from error
    print("workers have joined or left: restarting the script", file=sys.stderr)
    environ = _given() | place_in_job(os.environ) | {STARTED_AGAIN: f"{steps} {times}"}
    if exists:
        # Who finds none now is in another folder, on another disk for instance.
        environ[RESUME] = "must"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if START_FOLDER in os.environ:
        os.chdir(os.environ[START_FOLDER])  # The script's own path may be relative.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def starts_before(environ: Mapping[str, str], steps: int) -> int:
    """Return how often a process with this environment has started again since it saved after `steps` steps."""
    saved, _, times = environ.get(STARTED_AGAIN, "").partition(" ")
    return int(times) if saved == str(steps) and times.isdecimal() else 0


def _given() -> dict[str, str]:
    """The environment with which this process began: since then, threads were shared among as many as were here."""
    found = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    environ = dict(one.split("=", 1) for one in found if "=" in one)
    # A program that sets its title in `ps` overwrites it.
    return environ if is_elastic(environ) else dict(os.environ)
