"""Loss scaling (mixed_float16) over a distributed optimizer: all ranks skip the same steps.

In a step that is weighed by shares (the Trainer's) what overflows is what would overflow in one process with the whole
batch: the sum of the ranks' gradients, in float16 where one process would have summed them in float16. The same steps
are skipped, and the scale moves alike, for any number of ranks.

The gradients are added up first, and then tested. Where that would cost a reduction that the update does not need
(while gradients accumulate) or gives each rank only parts (ZeRO, divided models), the ranks first add up their largest
gradients, one number a variable: no sum is larger than that. Only if one may overflow are the gradients themselves
added up to see.

Outside of such a step each rank tests its own gradients, and all skip if one must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Sum
from hvdtrain.collectives.error_feedback import refuse_lossy
from hvdtrain.collectives.reduction import weighed
from hvdtrain.collectives.step_context import Step, current_step
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.variables import tf_variable


def correct_loss_scaling() -> None:
    """Correct Keras's LossScaleOptimizer around a distributed optimizer; calling again changes nothing."""
    correct(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
    correct(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    correct(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)


def _apply_scaled(
    original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    inner = self.inner_optimizer
    reducer = getattr(inner, "hvdtrain_reducer", None)
    if reducer is None or current_step() is None:
        return original(self, grads, trainable_variables)
    variables = list(trainable_variables or self._trainable_variables)
    reducer.pending = variables
    if reducer.holds_parts or inner.gradient_accumulation_steps or not self.built:
        return original(self, grads, trainable_variables)
    with inner.reduce_before(list(grads), variables) as reduced:
        return original(self, reduced, variables)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    """Return whether to apply `grads`: the same on all ranks, or one would wait for the others forever."""
    inner = self.inner_optimizer
    reducer = getattr(inner, "hvdtrain_reducer", None)
    if reducer is None:
        return original(self, grads)
    refuse_lossy(reducer.reduction.compression, "loss scaling (mixed_float16, on_nan='skip')")
    step = current_step()
    if step is None:
        return reducer.agreed(original(self, grads), "finite")
    variables = reducer.pending
    if reducer.early:
        return original(self, _in_half(grads, variables, step))

    def tested() -> Any:
        sums = _in_half(inner.summed(grads, variables), variables, step)
        return reducer.agreed(original(self, sums), "finite")

    bounds, limits = _bounds(grads), _limits(grads, variables, step)
    safe = tf.reduce_all(reducer.combined(bounds, Sum, "bounds") < limits)
    return tf.cond(reducer.agreed(safe, "safe"), lambda: tf.constant(True), tested)


def _bounds(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the largest absolute value of each of this rank's gradients, inf if it is not finite."""
    values = [_values(g) for g in weighed(gradients) if g is not None]
    sizes = [tf.abs(tf.cast(v, tf.float32)) for v in values]
    largest = [tf.reduce_max(tf.pad(tf.reshape(size, [-1]), [[0, 1]])) for size in sizes]
    finite = [tf.reduce_all(tf.math.is_finite(size)) for size in sizes]
    return tf.where(tf.stack(finite), tf.stack(largest), float("inf"))


def _limits(gradients: Sequence[Any], variables: Sequence[Any], step: Step) -> tf.Tensor:
    """Return what the sum of each gradient over the ranks must not reach."""
    present = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
    dtypes = [tf.float16 if _is_half(v, step) else tf.float32 for v in present]
    return tf.constant([dtype.max for dtype in dtypes], tf.float32)


def _in_half(gradients: Sequence[Any], variables: Sequence[Any], step: Step) -> list[Any]:
    """Return sums of gradients as one process would have found them, if that computes them in float16."""
    return [
        tf.cast(g, tf.float16) if g is not None and _is_half(v, step) else g
        for g, v in zip(gradients, variables, strict=True)
    ]


def _is_half(variable: Any, step: Step) -> bool:
    return id(tf_variable(variable)) in step.half


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Keras's loss scaling does not pass the loss on to the optimizer inside it."""
    return original(self, self.inner_optimizer.scale_loss(loss))
