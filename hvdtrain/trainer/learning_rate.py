"""A learning rate for many workers: scale it, and warm it up (Goyal et al. 2017, arXiv:1706.02677)."""

from __future__ import annotations

import math
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.learning_rate import require_settable

SCALINGS = {"none": lambda workers: 1.0, "linear": float, "sqrt": math.sqrt}
"""Factor for a number of workers: linear after Goyal et al., square root after Krizhevsky 2014 (arXiv:1404.5997)."""


def scale_learning_rate(optimizer: Any, scaling: str, workers: int) -> None:
    """Multiply the optimizer's learning rate by the factor that `scaling` gives for `workers`.

    Raises:
        UsageError: an unknown scaling, or a LearningRateSchedule, which cannot be set from outside.
    """
    if scaling not in SCALINGS:
        raise UsageError(f"learning_rate_scaling={scaling!r}: choose one of {', '.join(SCALINGS)}")
    factor = SCALINGS[scaling](workers)
    if factor != 1.0:
        require_settable(optimizer, f"learning_rate_scaling={scaling!r}")
        optimizer.learning_rate = float(optimizer.learning_rate) * factor


class WarmUp(keras.callbacks.Callback):
    """Raise the learning rate in equal steps from `start` to the optimizer's own over `epochs` epochs."""

    def __init__(self, start: float, epochs: float, steps_per_epoch: int) -> None:
        super().__init__()
        self._start = start
        self._steps = max(1, round(epochs * steps_per_epoch))
        self._done = 0
        self._target = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._target = float(self.model.optimizer.learning_rate)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._done < self._steps:
            self._done += 1
            rise = (self._target - self._start) * self._done / self._steps
            self.model.optimizer.learning_rate = self._start + rise
