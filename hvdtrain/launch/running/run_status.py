"""The status file in a run's log folder, from which `hvdtrain ps` reports the run and its progress."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from hvdtrain.launch.running.rank_monitor import RankStatus

NAME = "status.json"
WRITE_SECONDS = 5.0
LONGEST = 1_000_000
"""Maximum size of the file in bytes; a command can be long."""


@dataclass(frozen=True)
class RunStatus:
    """A run as last seen by its launcher.

    Attributes:
        run: Unique ID of the run.
        command: Launched command, without secrets.
        pid: Process ID of `hvdtrain run` on `host`.
        host: Host where the run was started.
        slurm_job: ID of the surrounding Slurm job; empty if there is none.
        started, updated: Seconds since the epoch.
        ranks: Number of running ranks; at the end, the last number.
        phase: Phase of the slowest rank (see `heartbeat.Phase`); empty before the first report.
        step: Last step that all ranks have begun, counted from 1; 0 before the first.
    """

    run: str
    command: str
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=platform.node)
    slurm_job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    ranks: int = 0
    phase: str = ""
    step: int = 0

    def with_ranks(self, ranks: Sequence[RankStatus]) -> RunStatus:
        """Return a copy updated with the current state of the ranks."""
        there = [one for one in ranks if one.heartbeat and one.state != "gone"]
        slowest = min(
            there, key=lambda one: one.heartbeat.step if one.heartbeat else 0, default=None
        )
        beat = slowest.heartbeat if slowest else None
        return replace(
            self,
            updated=time.time(),
            ranks=len(there) or self.ranks,
            phase=beat.phase if beat else self.phase,
            step=beat.step + 1 if beat else self.step,
        )

    def write(self, folder: Path) -> None:
        """Write the status to the log folder. Errors are ignored: they are no reason to end the run."""
        path = folder / f".{NAME}"
        with suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(self), file)
            path.replace(folder / NAME)


def read_status(folder: Path) -> RunStatus | None:
    """Read the status from a log folder. Returns None if it is missing or invalid."""
    try:
        with (folder / NAME).open("rb") as file:
            found = json.loads(file.read(LONGEST))
        status = RunStatus(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = {one.name: type(getattr(_ANY, one.name)) for one in fields(RunStatus)}
    right = all(type(getattr(status, name)) is kind for name, kind in kinds.items())
    return status if right else None


_ANY = RunStatus("", "", pid=1, host="", slurm_job="", started=0.0)
