"""Lets ranks combine numbers about once a second, at steps on which all of them agree."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max

CHECK_SECONDS = 1.0
"""Target time between two checks, each of which costs a small allreduce."""
MAX_STEPS = 1000
"""Maximum number of steps between two checks, however fast the steps are."""


class PeriodicCheck:
    """Schedules the steps at which the ranks check something together, by a collective called `name`."""

    def __init__(self, name: str, ranks: Communicator = ALL_RANKS) -> None:
        self._name = f"hvdtrain_{name}"
        self._ranks = ranks
        self._last: tuple[int, float] | None = None
        self._next = 0

    def due(self, steps: int) -> bool:
        """Whether to check after so many steps; the same on all ranks."""
        return steps >= self._next

    def reduce_max(self, steps: int, mine: Sequence[float]) -> np.ndarray:
        """Return the elementwise maximum of `mine` over all ranks, and schedule the next check. A collective.

        Args:
            steps: Number of steps trained so far, the same on all ranks.
            mine: Numbers of this rank.
        """
        now, pace = time.monotonic(), CHECK_SECONDS
        if self._last is not None and steps > self._last[0]:
            pace = (now - self._last[1]) / (steps - self._last[0])
        self._last = steps, now
        # All use the slowest rank's pace, so that they check again at the same step.
        sent = np.array([*mine, pace], np.float64)
        *everyones, slowest = self._ranks.allreduce(sent, self._name, Max).numpy()
        self._next = steps + int(np.clip(CHECK_SECONDS / max(slowest, 1e-9), 1, MAX_STEPS))
        return np.array(everyones)
