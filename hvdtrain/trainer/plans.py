"""What a call of fit will do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain.data import Source
from hvdtrain.trainer.callback_ranks import callback_facts


@dataclass(frozen=True)
class FitPlan:
    """What one call of `fit` will do; the same on every rank except for `verbose`.

    Attributes:
        train: Training data.
        validation: Validation data, if any.
        initial_epoch: Index of the first epoch, from 0.
        epochs: Number of the last epoch, from 1.
        validation_freq: Number of epochs between validations, or the numbers of the epochs, from 1, to validate after.
        callbacks: The user's callbacks, the same list on every rank.
        verbose: What to print: 0, 1 or 2; see `resolve_verbose`.
    """

    train: Source
    validation: Source | None
    initial_epoch: int
    epochs: int
    validation_freq: int | Collection[int]
    callbacks: Sequence[keras.callbacks.Callback]
    verbose: int

    def validates_after(self, epoch: int) -> bool:
        """Whether to validate at the end of the epoch with index `epoch`, from 0."""
        if self.validation is None:
            return False
        if not isinstance(self.validation_freq, Collection):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    def facts(self) -> dict[str, Any]:
        """Return what the ranks compare of the plan, besides its data."""
        freq = self.validation_freq
        return {
            "initial_epoch": self.initial_epoch,
            "epochs": self.epochs,
            "validation_freq": sorted(freq) if isinstance(freq, Collection) else freq,
            **callback_facts(self.callbacks),
        }
