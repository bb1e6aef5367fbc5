"""Tells the user, once for each place in the script, how its training was shared among the workers."""

from __future__ import annotations

import sys
from types import FrameType

from hvdtrain.messages import logger
from hvdtrain.runtime import Rank

WHOLE = "each worker trains on whole batches, which is exact but no faster than one process"
"""How the workers do what they do not share."""
BY_HAND = (
    "To share the work: hvdtrain.keras.DistributedGradientTape around the tape, "
    "dataset.apply(hvdtrain.data.shard) for the data, and hvdtrain.keras.broadcast_variables before the first step"
)


class Notes:
    """The messages so far, of rank 0.

    Args:
        rank: This process's place in the job.
        script: Absolute path of the script.
    """

    def __init__(self, rank: Rank, script: str) -> None:
        self.rank = rank
        self._script = script
        self._told: set[str] = set()

    def tell(self, what: str, how: str) -> None:
        """Print `how` the workers do `what`, a call in the script, unless it was printed for this line before."""
        line = f"{what} at {self._line()}: {how}"
        if line not in self._told:
            self._told.add(line)
            if self.rank.is_first:
                logger().info("adopt: %s", line)

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._script:
            frame = frame.f_back
        name = self._script.rpartition("/")[2]
        return name if frame is None else f"{name}:{frame.f_lineno}"
