"""Learning rate scaling and warm-up for large global batches (Goyal et al. 2017, arXiv:1706.02677)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.learning_rate import require_settable

SCALINGS = {"none": lambda workers: 1.0, "linear": float, "sqrt": math.sqrt}
"""Name -> factor for a number of workers: linear (Goyal et al.), square root (Krizhevsky 2014, arXiv:1404.5997)."""


def scale_learning_rate(optimizer: Any, scaling: str, workers: int) -> None:
    """Multiply the optimizer's learning rate by the factor of `scaling` for `workers` workers.

    Raises:
        UsageError: If the scaling is unknown, or the learning rate is a LearningRateSchedule, which cannot be changed.
    """
    if scaling not in SCALINGS:
        raise UsageError(f"learning_rate_scaling={scaling!r}: choose one of {', '.join(SCALINGS)}")
    factor = SCALINGS[scaling](workers)
    if factor != 1.0:
        require_settable(optimizer, f"learning_rate_scaling={scaling!r}")
        optimizer.learning_rate = float(optimizer.learning_rate) * factor


def scaled_by(scaling: str, workers: int) -> str:
    """Return `scaling` with what it depends on, in words."""
    return scaling if scaling == "none" else f"{scaling} in {workers} workers"


@dataclass(frozen=True)
class Ramp:
    """The warm-up of one optimizer.

    Attributes:
        optimizer: Optimizer whose learning rate is raised.
        start: Learning rate before the first step.
        target: Learning rate at the end of the warm-up.
    """

    optimizer: Any
    start: float
    target: float


class WarmUp(keras.callbacks.Callback):
    """Raises learning rates linearly, step by step, over the first `epochs` epochs.

    The rates depend on epoch and step alone, so a resumed run continues with the right ones. After the warm-up other
    callbacks may set them.

    Args:
        ramps: Optimizers with their learning rates at the beginning and end.
        epochs: Length of the warm-up in epochs; need not be whole.
        steps_per_epoch: Number of steps in an epoch; None: unknown.

    Raises:
        UsageError: If `epochs` is not a number of at least 0, or `steps_per_epoch` is unknown.
    """

    def __init__(self, ramps: Sequence[Ramp], epochs: Any, steps_per_epoch: int | None) -> None:
        if not isinstance(epochs, Real) or not float(epochs) >= 0:
            raise UsageError(f"warmup_epochs={epochs!r}: pass a number of epochs, 0 or more")
        if steps_per_epoch is None:
            raise UsageError("warmup_epochs needs data of known length: pass steps_per_epoch")
        super().__init__()
        self._ramps = ramps
        self._steps_per_epoch = steps_per_epoch
        self._steps = max(1, round(float(epochs) * steps_per_epoch))
        self._before = 0
        self._rising = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = epoch * self._steps_per_epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # With steps_per_execution only some steps are seen; the last one of the warm-up may be among the others.
        done = min(self._before + batch + 1, self._steps)
        if self._before + batch < self._steps or self._rising:
            for ramp in self._ramps:
                rise = (ramp.target - ramp.start) * done / self._steps
                ramp.optimizer.learning_rate = ramp.start + rise
            self._rising = done < self._steps
