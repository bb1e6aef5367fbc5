"""What ranks look at together about once a second: they agree on the step at which they look again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max

LOOK_SECONDS = 1.0
"""Between two looks, which cost a small allreduce each."""
MOST_STEPS = 1000
"""Between two looks, however fast the steps are."""


class Looks:
    """The steps at which to look.

    Args:
        name: of the collective.
        ranks: that train together.
    """

    def __init__(self, name: str, ranks: Communicator = ALL_RANKS) -> None:
        self._name = f"hvdtrain_{name}"
        self._ranks = ranks
        self._last: tuple[int, float] | None = None
        self._next = 0

    def due(self, steps: int) -> bool:
        """Whether to look now: the same on all ranks.

        Args:
            steps: trained so far, the same on all ranks.
        """
        return steps >= self._next

    def together(self, steps: int, mine: Sequence[float]) -> np.ndarray:
        """Return the largest of all ranks' numbers, each for itself. A collective, when it is due."""
        now, pace = time.monotonic(), LOOK_SECONDS
        if self._last is not None and steps > self._last[0]:
            pace = (now - self._last[1]) / (steps - self._last[0])
        self._last = steps, now
        # The slowest rank's pace, so that all look again at the same step.
        sent = np.array([*mine, pace], np.float64)
        *everyones, slowest = self._ranks.allreduce(sent, self._name, Max).numpy()
        self._next = steps + int(np.clip(LOOK_SECONDS / max(slowest, 1e-9), 1, MOST_STEPS))
        return np.array(everyones)
