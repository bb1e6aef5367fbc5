"""What the tasks of srun report about themselves.

srun does not notice that hvdtrain's process of a task is stopped, or that a slurmstepd, Slurm's daemon above it, was
killed: the task is then silent while others go on telling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NEWS_SECONDS = 5.0
"""Interval of a task's news while nothing changes."""
SILENT_SECONDS = 30.0
"""Without a report from a task that has reported before; the same as for an agent without its supervisor."""
BEGIN_SECONDS = 60.0
"""For the other tasks to begin after the first, unless --start-timeout is longer: Python starts late from a busy file
system."""
_WITNESS_SECONDS = 3 * NEWS_SECONDS
"""If no task has reported for this long, the network or srun itself is slow."""


@dataclass
class SrunTasks:
    """When each task reported last.

    Attributes:
        hosts: the node of each rank; empty for ranks that srun did not start.
    """

    hosts: Sequence[str] = ()
    _begin: float = BEGIN_SECONDS
    _first: float = 0.0
    _heard: dict[int, float] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def expect(self, hosts: Sequence[str], begin: float) -> None:
        """srun starts a task for each of these, the later ones within `begin` seconds of the first."""
        self.hosts, self._begin = hosts, begin

    def hear(self, rank: int, *, ended: bool) -> None:
        """Record a report of a task: it is alive, or its command has ended."""
        now = time.monotonic()
        self._first = self._first or now
        self._heard[rank] = now
        if ended:
            self._ended.add(rank)

    def silent(self, awake: float, longest: float) -> Iterator[tuple[str, float]]:
        """The tasks that have been silent for too long, and for how many seconds at least.

        Args:
            awake: how long this process has listened without a pause, in seconds.
            longest: the limit if no task tells anything.
        """
        if not self._heard:
            return  # Slurm has not started any yet.
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
