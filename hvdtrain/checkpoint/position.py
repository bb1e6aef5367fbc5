"""The position of a training, as a checkpoint records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FitPosition:
    """A position in a training.

    Attributes:
        epoch: Index of the next epoch, or of the one in progress, from 0.
        step: Index of the next step in that epoch, from 0.
        steps: Number of steps trained so far, over all epochs.
        stopped: Whether a callback has ended the training.
        trained: Logs of the epoch's steps, if all of them are trained and only its validation is left.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 0
    stopped: bool = False
    trained: dict[str, Any] | None = None

    def describe(self, epochs: int) -> str:
        """Return a message for the user about how a run of `epochs` epochs continues from here."""
        if self.epoch >= epochs:
            return f"nothing to train: {self.epoch} epochs are complete, epochs={epochs}"
        if self.stopped:
            return f"nothing to train: a callback stopped this run after epoch {self.epoch} of {epochs}"
        if self.trained is not None:
            return f"resuming with the validation of epoch {self.epoch + 1} of {epochs}"
        within = f", after step {self.step}" if self.step else ""
        return f"resuming in epoch {self.epoch + 1} of {epochs}{within}"
