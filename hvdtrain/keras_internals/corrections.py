"""Corrections of Keras classes, for models whose optimizer is distributed only. Tested with Keras 3.15.

LossScaleOptimizer agrees over the ranks whether gradients are finite, and a model that is to be compiled by XLA
keeps Horovod's operations, which have no XLA kernel, outside the compiled part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.keras_internals.optimizers import gradients_taken, is_distributed, require_gradients


def prepare_keras() -> None:
    """Install the corrections; calling again changes nothing."""
    correct(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    correct(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)
    correct(keras.Model, "make_train_function", _make_train_function)


def correct(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let `replacement(original, self, ...)` stand in for a method of `owner`; calling again changes nothing."""
    original = getattr(owner, name)
    if getattr(original, "hvdtrain_corrected", False):
        return

    @functools.wraps(original)
    def corrected(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    corrected.hvdtrain_corrected = True  # type: ignore[attr-defined]
    setattr(owner, name, corrected)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    """All ranks skip the step if one has an inf or nan; else the others would wait for it for ever."""
    finite = original(self, grads)
    reducer = getattr(self.inner_optimizer, "hvdtrain_reducer", None)
    if reducer is None:
        return finite
    vote = reducer.extreme(tf.cast(finite, tf.int32), hvd.Min, "finite", everyone=True)
    return tf.cast(vote, tf.bool)


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Keras's loss scaling does not pass the loss on to the optimizer inside it."""
    return original(self, self.inner_optimizer.scale_loss(loss))


def _make_train_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    if not (is_distributed(self.optimizer) and self.jit_compile):
        return original(self, force)
    if self.train_function is not None and not force:
        return self.train_function
    self.jit_compile = False
    try:
        self.train_function = self._make_function(split_train_step(self))
    finally:
        self.jit_compile = True
    return self.train_function


def split_train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Return model.train_step in two parts: forward and backward compiled by XLA, reduction and update not.

    While XLA's part is traced, the optimizer hands the gradients out instead of applying them. Works for a
    user's own train_step too, if it applies gradients once.
    """
    optimizer = model.optimizer
    handed_out: list[tuple[Any, Any]] = []

    @tf.function(jit_compile=True, autograph=False)
    def forward_and_backward(data: Any) -> Any:
        handed_out.clear()

        def take(pairs: list[tuple[Any, Any]]) -> bool:
            handed_out.extend((g, v) for g, v in pairs if g is not None)
            return True

        with gradients_taken(optimizer, take):
            logs = model.train_step(data)
        require_gradients(model, handed_out)
        return logs, [gradient for gradient, _ in handed_out]

    def train_step(data: Any) -> Any:
        logs, gradients = forward_and_backward(data)
        variables = [variable for _, variable in handed_out]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logs

    return train_step
