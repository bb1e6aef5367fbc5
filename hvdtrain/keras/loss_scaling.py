"""Loss scaling (mixed_float16) over a distributed optimizer: all ranks skip the same steps.

In a step that is weighed by shares (the Trainer's) the ranks' scaled gradients are added up first, and then tested
for overflow, in float16 where one process would have summed them in float16: the same steps are skipped, and the
scale moves alike, for any number of ranks. Elsewhere, and while gradients accumulate or lie in parts, each rank tests
its own, and all skip if one must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Min
from hvdtrain.collectives.step import current_step
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.variables import tf_variable


def correct_loss_scaling() -> None:
    """Correct Keras's LossScaleOptimizer around a distributed optimizer; calling again changes nothing."""
    correct(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
    correct(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    correct(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    """All ranks skip the step if one has an inf or nan; else the others would wait for it for ever."""
    reducer = getattr(self.inner_optimizer, "hvdtrain_reducer", None)
    if reducer is not None and reducer.early:
        # All ranks have the same sums, of which one process would have found some in float16.
        grads = [_in_half(g, v) for g, v in zip(grads, reducer.pending, strict=True)]
    finite = original(self, grads)
    if reducer is None or reducer.early:
        return finite
    vote = reducer.extreme(tf.cast(finite, tf.int32), Min, "finite", everyone=True)
    return tf.cast(vote, tf.bool)


def _apply_scaled(
    original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """In a step that is weighed by shares the ranks' gradients are added up before anything is tested for overflow."""
    inner = self.inner_optimizer
    reducer = getattr(inner, "hvdtrain_reducer", None)
    whole = (
        reducer is not None and not reducer.holds_parts and not inner.gradient_accumulation_steps
    )
    if not whole or current_step() is None or not self.built:
        return original(self, grads, trainable_variables)
    variables = list(trainable_variables or self._trainable_variables)
    with inner.reduce_before(list(grads), variables) as reduced:
        return original(self, reduced, variables)


def _in_half(gradient: Any, variable: Any) -> Any:
    """A sum of gradients as one process would have found it, if that computes it in float16."""
    step = current_step()
    if step is None or id(tf_variable(variable)) not in step.half or not tf.is_tensor(gradient):
        return gradient  # Slices are not summed where they are computed.
    return tf.cast(gradient, tf.float16)


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Keras's loss scaling does not pass the loss on to the optimizer inside it."""
    return original(self, self.inner_optimizer.scale_loss(loss))
