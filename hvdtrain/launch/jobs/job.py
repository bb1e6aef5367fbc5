"""One thing that runs, in the words of `hvdtrain ps`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.running.run_status import RunStatus


@dataclass(frozen=True)
class Job:
    """A launch, a Slurm job or a container.

    Attributes:
        name: by which `hvdtrain logs` and `stop` know it.
        kind: run, slurm or container.
        state: such as running or pending.
        command: what runs.
        seconds: since when; None if it has not started.
        status: of its ranks; None if unknown.
        log_dir: where the ranks' output is kept; None if unknown.
        show: the command that prints its output where no log folder is known.
        stop: the command that ends it.
    """

    name: str
    kind: str
    state: str
    command: str
    seconds: float | None
    stop: tuple[str, ...]
    status: RunStatus | None = None
    log_dir: Path | None = None
    show: tuple[str, ...] = ()
