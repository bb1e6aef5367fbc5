"""Tells the user, once for each place in the script, how its training was shared among the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from hvdtrain.messages import logger
from hvdtrain.runtime import Rank

Tell = Callable[[str, str], None]
"""`Notes.explain`: told what in the script is done otherwise, and how."""
WHOLE = "each worker trains on whole batches, which is exact but no faster than one process"
"""How the workers do what they do not share."""
NOT_GROWN = (
    "each worker trains on whole batches, as large as the script makes them, with its learning rate"
)
"""The same, if batches or learning rates were to grow."""
BY_HAND = (
    "To share the work: hvdtrain.keras.DistributedGradientTape around the tape, "
    "dataset.apply(hvdtrain.data.shard) for the data, and hvdtrain.keras.broadcast_variables before the first step"
)


class Notes:
    """The messages so far, of rank 0.

    Args:
        rank: This process's place in the job.
        script: Absolute path of the script.
        explains: Whether to tell of everything that is done otherwise than on one process.
    """

    def __init__(self, rank: Rank, script: str, explains: bool = False) -> None:
        self.rank = rank
        self._script = script
        self._explains = explains
        self._told: set[str] = set()

    def tell(self, what: str, how: str) -> None:
        """Print `how` the workers do `what`, a call in the script, unless it was printed for this line before."""
        self._print(f"{self.place(what)}: {how}")

    def place(self, what: str) -> str:
        """Return where the script makes a call, such as "fit at train.py:12"."""
        return f"{what} at {self._line()}"

    def explain(self, what: str, how: str) -> None:
        """Print the same if everything is to be told."""
        if self._explains:
            self.tell(what, how)

    def explain_start(self, *lines: str) -> None:
        """Print lines about the whole run if everything is to be told."""
        for line in lines if self._explains else ():
            self._print(line)

    def _print(self, line: str) -> None:
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
