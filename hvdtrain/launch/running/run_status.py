"""What a run is, and how far it has come: a small file in its log folder, for `hvdtrain ps`."""

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
"""Bytes of the file; a command can be long."""


@dataclass(frozen=True)
class RunStatus:
    """A run, as its launcher saw it last.

    Attributes:
        run: its unique name.
        pid: of its `hvdtrain run`, on `host`.
        host: where it was started.
        slurm_job: number of the Slurm job in which it runs; empty if in none.
        command: what was launched, without secrets.
        started, updated: in seconds since the epoch.
        ranks: how many there are; at the end, how many there were.
        phase: of the ranks (see `heartbeat.Phase`), of the slowest ones if they differ; empty before the first.
        step: the last step that all have begun, counted from 1; 0 before the first.
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
        """This run, updated with the current state of its ranks."""
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
        """Into the run's log folder; a folder that cannot be written is no reason to end the run."""
        path = folder / f".{NAME}"
        with suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(self), file)
            path.replace(folder / NAME)


def read_status(folder: Path) -> RunStatus | None:
    """The status in a log folder; None if there is none, or it is not valid."""
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
