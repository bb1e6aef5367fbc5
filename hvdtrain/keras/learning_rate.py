"""Callbacks that set the learning rate during training: schedules and warm-up.

Momentum correction (Goyal et al. 2017, arXiv:1706.02677, section 3): the velocity of SGD contains past learning
rates, v = m v - lr g. When the rate changes, Horovod multiplies the momentum m by new / old for one step. In Keras 3
the momentum is a constant in the compiled step, so the velocity is multiplied instead, which gives the same step.
(With Nesterov momentum, which uses m v a second time in the same step, only the old velocity is corrected: the new one
already contains the new rate.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.keras_internals.optimizers import rate_variable, velocities

Multiplier = Callable[[float], float]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` until `end_epoch`.

    Adds the rate to the logs of each epoch as "lr".

    Args:
        initial_lr: Learning rate to multiply.
        multiplier: Function of the epoch that returns the factor; or a number, for a factor of
            multiplier ** (epoch - start_epoch).
        start_epoch: First epoch to adjust.
        end_epoch: Epoch at which to stop adjusting. Default: never.
        staircase: Adjust the rate at the start of each epoch. Otherwise it is adjusted before each batch, and `epoch`
            is epoch + batch / steps_per_epoch.
        momentum_correction: Scale the velocity of SGD or RMSprop with momentum when the rate changes (Goyal et al.
            2017, arXiv:1706.02677, section 3).
        steps_per_epoch: Number of batches per epoch. Default: that of fit.

    Raises:
        UsageError: `initial_lr` is None; from fit: the optimizer's learning rate is a schedule, or
            `steps_per_epoch` is needed and unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Multiplier,
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError(f"{type(self).__name__}: initial_lr is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = (
            multiplier if callable(multiplier) else _exponential(multiplier, start_epoch)
        )
        self._epoch = 0
        self._scale_velocities: Callable[[tf.Tensor], None] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        require_settable(self.model.optimizer, type(self).__name__)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__}: the number of batches is unknown: pass steps_per_epoch"
                )
        self._scale_velocities = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        after_end = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or after_end:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _set_rate(self, epoch: float) -> None:
        old = self._rate()
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        new = self._rate()
        if self.momentum_correction and old > 0 and new != old:
            self._correct(new / old)

    def _correct(self, factor: float) -> None:
        if not self.model.optimizer.built:
            return  # No velocity yet.
        if self._scale_velocities is None:
            self._scale_velocities = _scaling_of(_velocities(self.model.optimizer))
        self._scale_velocities(tf.constant(factor))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs (Goyal et al. 2017).

    In batch b (from 0) of an epoch the rate is
    initial_lr / size * (1 + (size - 1) * (epoch + (b + 1) / steps_per_epoch) / warmup_epochs).

    Args:
        initial_lr: Learning rate after the warm-up, usually that of one worker times the number of workers.
        warmup_epochs: Length of the warm-up.
        momentum_correction: As in LearningRateScheduleCallback.
        steps_per_epoch: As in LearningRateScheduleCallback.
        verbose: 1: print the learning rate after the warm-up, on rank 0.

    Raises:
        UsageError: As in LearningRateScheduleCallback.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _warmup(self, epoch: float) -> float:
        assert self.steps_per_epoch is not None
        # One batch ahead, so that the last batch has the full rate.
        epoch += 1 / self.steps_per_epoch
        return (epoch * (ALL_RANKS.size() - 1) / self.warmup_epochs + 1) / ALL_RANKS.size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and ALL_RANKS.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


def require_settable(optimizer: Any, what: str) -> None:
    """Check that the learning rate of `optimizer` is a number, which can be set.

    Args:
        optimizer: A Keras optimizer.
        what: What needs to set the rate, for the message.

    Raises:
        UsageError: The learning rate is a schedule, or there is no optimizer.
    """
    if optimizer is None:
        raise UsageError(
            f"{what} sets the learning rate of the optimizer of compile, and there is none"
        )
    if rate_variable(optimizer) is None:
        raise UsageError(
            f"{what} needs a learning rate that is a number; this optimizer has a schedule: "
            "scale and warm up inside the schedule"
        )


def _exponential(base: float, start_epoch: int) -> Multiplier:
    return lambda epoch: base ** (epoch - start_epoch)


def _velocities(optimizer: Any) -> list[tf.Variable]:
    """Return the momenta that contain past learning rates; warn if that is unknown for this optimizer."""
    found = velocities(optimizer)
    if found is None:
        name = type(optimizer).__name__
        warn_user(
            f"momentum_correction has no effect on {name}: it is implemented for SGD and RMSprop "
            "only"
        )
    return [v.value for v in found or []]


def _scaling_of(variables: list[tf.Variable]) -> Callable[[tf.Tensor], None]:
    @tf.function(autograph=False)
    def scale(factor: tf.Tensor) -> None:
        for variable in variables:
            variable.assign(variable * tf.cast(factor, variable.dtype))

    return scale if variables else lambda factor: None
