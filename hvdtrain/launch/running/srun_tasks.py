"""Track the reports of srun's tasks.

srun does not notice if hvdtrain's process in a task is stopped, or if slurmstepd, Slurm's daemon above it, is killed;
the task then falls silent while others go on reporting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NEWS_SECONDS = 5.0
"""Interval between a task's reports while nothing changes."""
SILENT_SECONDS = 30.0
"""Limit on the silence of a task that has reported before; the same as for an agent without its supervisor."""
BEGIN_SECONDS = 60.0
"""Time for the other tasks to start after the first, unless --start-timeout is longer. Python starts slowly from a busy
file system."""
_WITNESS_SECONDS = 3 * NEWS_SECONDS
"""If no task has reported for this long, the network or srun itself is slow."""


@dataclass
class SrunTasks:
    """Times of the last report of each task.

    Attributes:
        hosts: Node of each rank; empty for ranks that srun did not start.
    """

    hosts: Sequence[str] = ()
    _begin: float = BEGIN_SECONDS
    _first: float = 0.0
    _heard: dict[int, float] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def expect(self, hosts: Sequence[str], begin: float) -> None:
        """Set the node of each task, and the seconds after the first within which the others begin."""
        self.hosts, self._begin = hosts, begin

    def hear(self, rank: int, *, ended: bool) -> None:
        """Record a report of a task: it is alive, or its command has ended."""
        now = time.monotonic()
        self._first = self._first or now
        self._heard[rank] = now
        if ended:
            self._ended.add(rank)

    def silent(self, awake: float, longest: float) -> Iterator[tuple[str, float]]:
        """Yield each task that has been silent for too long, and the limit in seconds that it exceeded.

        Args:
            awake: Seconds for which this process has listened without a pause.
            longest: Limit in seconds if no task reports at all.
        """
        if not self._heard:
            return  # Slurm has not started any task yet.
        now = time.monotonic()
        there = [rank for rank in range(len(self.hosts)) if rank not in self._ended]
        others_tell = any(
            now - self._heard.get(one, self._first) < _WITNESS_SECONDS for one in there
        )
        for rank in there:
            limit = SILENT_SECONDS if rank in self._heard else self._begin
            limit = limit if others_tell else longest
            if min(awake, now - self._heard.get(rank, self._first)) >= limit:
                yield f"rank {rank} on host {self.hosts[rank]}", limit
