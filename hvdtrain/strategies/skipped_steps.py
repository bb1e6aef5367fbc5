"""Skip steps whose gradients contain nan or inf: weights, optimizer and statistics remain unchanged.

The optimizer is wrapped in Keras's LossScaleOptimizer with a constant scale of 1, whose test for finite gradients, and
whose agreement over ranks in every layout (`hvdtrain.keras.loss_scaling`), are those of mixed_float16.
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
    identities,
    seed_variables,
    tf_variable,
    untracked_variables,
    without,
)

_NEVER = 2**31 - 1


class _UnitScale:
    """Mixin for a LossScaleOptimizer that keeps its scale at 1.

    Files and checkpoints contain only the optimizer inside it, as with every other policy.
    """

    hvdtrain_unit_scale = True
    inner_optimizer: Any

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        # Without a division by 1, and without counting steps until the scale grows.
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
        # Keras looks here for what else to save.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


class _Counting:
    """Mixin for a LossScaleOptimizer that counts the updates it skips, including those for a loss of nan or inf."""

    hvdtrain_skipped: SkippedSteps

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        known = self._trainable_variables  # type: ignore[attr-defined]
        trained = known if trainable_variables is None else trainable_variables
        self.hvdtrain_skipped.trained |= identities(trained)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        # An infinite loss may have finite gradients; nan in all of them is found by every rank's test.
        factor = tf.where(tf.reduce_all(tf.math.is_finite(loss)), 1.0, np.nan)
        return super().scale_loss(loss * tf.cast(factor, loss.dtype))  # type: ignore[misc]

    def _stateful_handle_non_finite_grads(self) -> None:
        self.hvdtrain_skipped.add()
        super()._stateful_handle_non_finite_grads()  # type: ignore[misc]


def skipping(optimizer: Any, precision: str) -> Any:
    """Wrap a Keras optimizer so that it skips updates whose gradients are not all finite.

    With the precision mixed_float16 Keras wraps it in an optimizer that does so already.
    """
    if precision == "mixed_float16" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    scaled = keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=1.0, dynamic_growth_steps=_NEVER
    )
    overlay(scaled, _UnitScale, named=type(optimizer))
    return scaled


class SkippedSteps:
    """Counts the skipped steps of a model, and undoes all other changes that such a step makes.

    Args:
        model: Model that is trained.
        are_usual: Whether skipped steps are normal, as while dynamic loss scaling adjusts its scale.

    Attributes:
        trained: Ids of the variables for which the optimizer got gradients; it leaves them unchanged by itself.
    """

    def __init__(self, model: keras.Model, are_usual: bool) -> None:
        self.are_usual = are_usual
        self.trained: set[int] = set()
        self._model = model
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._in_a_row = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self) -> None:
        """Count one skipped step, in the graph of a step."""
        self._count.assign_add(1)

    @property
    def count(self) -> int:
        """Number of skipped steps so far; the same on all ranks."""
        return int(self._count.numpy())

    @property
    def in_a_row(self) -> int:
        """Number of skipped steps in a row up to now."""
        return int(self._in_a_row.numpy())

    def around(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `step` so that skipping it also restores statistics, metrics, and weights assigned directly.

        A batch with a nan would spoil them for good. Random seeds still advance.
        """

        def run(data: Any) -> Any:
            variables = self._variables()
            before = tf.identity(self._count)
            values = [tf.identity(variable) for variable in variables]
            logs = step(data)
            skipped = self._count > before
            # The trained variables are known only now; unused reads of them are pruned from the graph.
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
        """Return all variables that a step may change, except the optimizer's."""
        model = self._model
        state = [*model.variables, *untracked_variables(model), *state_variables(model.metrics)]
        return [tf_variable(v) for v in without(state, seed_variables(model))]


def count_skipped_steps(model: keras.Model) -> None:
    """Prepare a model that was compiled with the result of `skipping`; see `skipped_steps_of`.

    Raises:
        UsageError: The model has several optimizers.
    """
    (optimizer, *others) = optimizers_of(model)
    if others:
        raise UsageError(
            f"on_nan='skip' works for models with one optimizer, and {type(model).__name__} has {1 + len(others)}: "
            "choose 'stop' or 'rewind'"
        )
    overlay(optimizer, _Counting)
    # Not through Keras's __setattr__, which would track (and save) the values.
    skipped = SkippedSteps(model, are_usual=is_scaled(optimizer))
    object.__setattr__(optimizer, "hvdtrain_skipped", skipped)


def skipped_steps_of(model: keras.Model) -> SkippedSteps | None:
    """Return the counter of the skipped steps of `model`, or None if none are skipped."""
    return getattr(model.optimizer, "hvdtrain_skipped", None)
