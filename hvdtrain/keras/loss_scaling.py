"""Loss scaling (mixed_float16) around a distributed optimizer: all ranks skip the same steps.

In a step weighted by shares (the Trainer's), the test for overflow is that of one process with the whole batch: it
tests the sum of the ranks' gradients, in float16 where one process would have summed them in float16. So the same
steps are skipped, and the scale changes in the same way, for any number of ranks.

The gradients are summed first, and then tested; so a compression to float16 sends them scaled. If that needs a
reduction that the update does not (while gradients accumulate), or gives each rank only parts (ZeRO, divided models),
the ranks first sum the largest absolute value of each gradient, one number per variable, which is an upper bound of
the sum. Only if a bound may overflow are the gradients themselves summed for the test.

Outside of such a step, where gradients accumulate, each rank tests its own, and all ranks skip the step if one must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Sum
from hvdtrain.collectives.error_feedback import refuse_lossy
from hvdtrain.collectives.reduction import weighted
from hvdtrain.collectives.step_context import Step, current_step
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.variables import identity


def correct_loss_scaling() -> None:
    """Correct Keras's LossScaleOptimizer for distributed optimizers. Idempotent."""
    correct(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
    correct(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    correct(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)


def _apply_scaled(
    original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    inner = self.inner_optimizer
    reducer = getattr(inner, "hvdtrain_reducer", None)
    if reducer is None:
        return original(self, grads, trainable_variables)
    variables = list(trainable_variables or self._trainable_variables)
    reducer.pending = variables
    if not self.built:
        self.build(variables)
    if reducer.holds_parts or inner.gradient_accumulation_steps:
        return original(self, grads, trainable_variables)
    with inner.reduce_before(list(grads), variables) as reduced:
        return original(self, reduced, variables)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    """Return whether to apply `grads`: the same on all ranks, as otherwise one would wait for the others forever."""
    inner = self.inner_optimizer
    reducer = getattr(inner, "hvdtrain_reducer", None)
    if reducer is None:
        return original(self, grads)
    refuse_lossy(reducer.reduction.compression, "loss scaling (mixed_float16, on_nan='skip')")
    step, variables = current_step(), reducer.pending
    if reducer.early:
        finite = original(self, grads if step is None else _in_half(grads, variables, step))
        # The gradients of local variables are this rank's own.
        return reducer.agreed(finite, "finite") if reducer.local_variables else finite
    if step is None:
        return reducer.agreed(original(self, grads), "finite")

    def tested() -> Any:
        sums = _in_half(inner.summed(grads, variables), variables, step)
        return reducer.agreed(original(self, sums), "finite")

    bounds, limits = _bounds(grads), _limits(grads, variables, step)
    safe = tf.reduce_all(reducer.combined(bounds, Sum, "bounds") < limits)
    return tf.cond(reducer.agreed(safe, "safe"), lambda: tf.constant(True), tested)


def _bounds(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the largest absolute value of each of this rank's gradients; inf for one that is not finite."""
    values = [_values(g) for g in weighted(gradients) if g is not None]
    sizes = [tf.abs(tf.cast(v, tf.float32)) for v in values]
    largest = [tf.reduce_max(tf.pad(tf.reshape(size, [-1]), [[0, 1]])) for size in sizes]
    finite = [tf.reduce_all(tf.math.is_finite(size)) for size in sizes]
    return tf.where(tf.stack(finite), tf.stack(largest), float("inf"))


def _limits(gradients: Sequence[Any], variables: Sequence[Any], step: Step) -> tf.Tensor:
    """Return the limit for the sum of each gradient over the ranks: the largest number of its dtype."""
    present = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
    dtypes = [tf.float16 if _is_half(v, step) else tf.float32 for v in present]
    return tf.constant([dtype.max for dtype in dtypes], tf.float32)


def _in_half(gradients: Sequence[Any], variables: Sequence[Any], step: Step) -> list[Any]:
    """Cast the summed gradients that one process would have computed in float16 to float16."""
    return [
        tf.cast(g, tf.float16) if g is not None and _is_half(v, step) else g
        for g, v in zip(gradients, variables, strict=True)
    ]


def _is_half(variable: Any, step: Step) -> bool:
    return identity(variable) in step.half


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Also apply the inner optimizer's scale_loss, which Keras's loss scaling does not call."""
    return original(self, self.inner_optimizer.scale_loss(loss))
