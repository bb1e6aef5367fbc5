"""Steps whose gradients are nan or inf are skipped: weights, optimizer and statistics stay as they were.

The optimizer goes into Keras's LossScaleOptimizer with a scale that stays 1. Its test, and its agreement over the
ranks in every layout (`hvdtrain.keras.loss_scaling`), are those of mixed_float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.metrics import state_variables
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import is_scaled
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import (
    seed_variables,
    tf_variable,
    untracked_variables,
    without,
)

_NEVER = 2**31 - 1


class _UnitScale:
    """Laid over a LossScaleOptimizer whose scale is 1: it stays 1.

    Files and checkpoints know of the optimizer inside it alone: they are those of every other policy.
    """

    hvdtrain_unit_scale = True
    inner_optimizer: Any

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        # Without dividing all of them by 1, and counting.
        self.inner_optimizer.apply(grads, trainable_variables)

    def _stateful_handle_non_finite_grads(self) -> None:
        pass

    @property
    def variables(self) -> list[Any]:
        return self.inner_optimizer.variables

    def save_own_variables(self, store: Any) -> None:
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        self.inner_optimizer.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        return self.inner_optimizer.get_config()

    def __dir__(self) -> list[str]:
        # Where Keras looks for what else to save.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


class _Counting:
    """Laid over a LossScaleOptimizer: counts the updates that it leaves out, those of a loss of nan or inf too."""

    hvdtrain_skipped: SkippedSteps

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        known = self._trainable_variables  # type: ignore[attr-defined]
        trained = known if trainable_variables is None else trainable_variables
        self.hvdtrain_skipped.trained |= {id(tf_variable(v)) for v in trained}
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        # The gradients of an infinite loss may be finite: nan in all of them is what every rank's test finds.
        factor = tf.where(tf.reduce_all(tf.math.is_finite(loss)), 1.0, np.nan)
        return super().scale_loss(loss * tf.cast(factor, loss.dtype))  # type: ignore[misc]

    def _stateful_handle_non_finite_grads(self) -> None:
        self.hvdtrain_skipped.add()
        super()._stateful_handle_non_finite_grads()  # type: ignore[misc]


def skipping(optimizer: Any, precision: str) -> Any:
    """Return an optimizer that leaves out updates whose gradients are not all finite, around a Keras optimizer.

    With the precision mixed_float16 Keras puts it into one that does so already.
    """
    if precision == "mixed_float16" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    scaled = keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=1.0, dynamic_growth_steps=_NEVER
    )
    overlay(scaled, _UnitScale, named=type(optimizer))
    return scaled


class SkippedSteps:
    """Counts the steps of a model that are skipped, and lets nothing of such a step stay.

    Args:
        model: that is trained.
        are_usual: whether a skipped step means nothing, as when loss scaling finds its scale.

    Attributes:
        trained: ids of the variables that the optimizer was given gradients of, which it leaves alone by itself.
    """

    def __init__(self, model: keras.Model, are_usual: bool) -> None:
        self.are_usual = are_usual
        self.trained: set[int] = set()
        self._model = model
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._in_a_row = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self) -> None:
        """Count one, in the graph of a step."""
        self._count.assign_add(1)

    @property
    def count(self) -> int:
        """How many so far: the same on all ranks."""
        return int(self._count.numpy())

    @property
    def in_a_row(self) -> int:
        """How many of the newest steps were skipped, one after the other."""
        return int(self._in_a_row.numpy())

    def around(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `step`; one that is skipped changes nothing else either: statistics, metrics, weights of a teacher.

        A batch with a nan in it would spoil them for good. Random numbers go on.
        """

        def run(data: Any) -> Any:
            variables = self._variables()
            before = tf.identity(self._count)
            values = [tf.identity(variable) for variable in variables]
            logs = step(data)
            skipped = self._count > before
            # Which ones are trained is known now; what was read of them in vain is not in the graph.
            others = [
                pair
                for pair in zip(variables, values, strict=True)
                if id(pair[0]) not in self.trained
            ]

            def put_back() -> None:
                for variable, value in others:
                    variable.assign(value)

            tf.cond(skipped, put_back, lambda: None)
            self._in_a_row.assign(tf.where(skipped, self._in_a_row + 1, 0))
            return logs

        return run

    def _variables(self) -> list[tf.Variable]:
        """What a step may change, but for the optimizer's own."""
        model = self._model
        state = [*model.variables, *untracked_variables(model), *state_variables(model.metrics)]
        return [tf_variable(v) for v in without(state, seed_variables(model))]


def count_skipped_steps(model: keras.Model) -> None:
    """Prepare a model that was compiled with what `skipping` returned; see `skipped_steps_of`.

    Raises:
        UsageError: it has several optimizers.
    """
    (optimizer, *others) = optimizers_of(model)
    if others:
        raise UsageError(
            f"on_nan='skip' works for models with one optimizer, and {type(model).__name__} has {1 + len(others)}: "
            "choose 'stop' or 'rewind'"
        )
    overlay(optimizer, _Counting)
    # Not through Keras's __setattr__, which would track (and save) what it holds.
    skipped = SkippedSteps(model, are_usual=is_scaled(optimizer))
    object.__setattr__(optimizer, "hvdtrain_skipped", skipped)


def skipped_steps_of(model: keras.Model) -> SkippedSteps | None:
    """Return what counts the skipped steps of `model`; None if none are skipped."""
    return getattr(model.optimizer, "hvdtrain_skipped", None)
