"""Corrections of Keras classes for models that communicate, without effect on others. Tested with Keras 3.15.

With jit_compile=True, XLA compiles the parts of a step between Horovod's operations, which have no XLA kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from hvdtrain.keras_internals.models import overridden
from hvdtrain.keras_internals.optimizers import is_distributed


def prepare_keras() -> None:
    """Install the corrections. Idempotent."""
    correct(keras.Model, "_make_function", _make_function)
    # Of Trainer, which defines it, because Keras checks whether a model's class overrides it.
    correct(Trainer, "compile", _compile)


def correct(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace the method `name` of `owner`: calls go to `replacement(original, self, ...)`. Idempotent."""
    if getattr(getattr(owner, name), "hvdtrain_corrected", False):
        return
    corrected = _calling(replacement, getattr(owner, name))
    corrected.hvdtrain_corrected = True  # type: ignore[attr-defined]
    setattr(owner, name, corrected)


def replaced(
    owner: Any, name: str, replacement: Callable[..., Any]
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which calls of a function or method go to `replacement(original, ...)`."""
    return mock.patch.object(owner, name, _calling(replacement, getattr(owner, name)))


def _calling(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


def _compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop an argument for TensorFlow 2.0 that Horovod's examples, and so most scripts, pass, and Keras 3 rejects."""
    kwargs.pop("experimental_run_tf_function", None)
    return original(self, *args, **kwargs)


def _make_function(original: Callable[..., Any], self: Any, step: Callable[[Any], Any]) -> Any:
    """Let XLA compile all but the collectives of a train_step or test_step that may communicate."""
    communicates = is_distributed(self.optimizer) or overridden(self, "train_step", "test_step")
    if not (self.jit_compile and communicates):
        return original(self, step)
    self.jit_compile = False
    try:
        return original(self, in_clusters(step))
    finally:
        self.jit_compile = True


def in_clusters(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `step` for a tf.function of which XLA compiles the clusters of operations that it supports.

    TensorFlow finds the clusters in the complete graph, so the step may apply gradients and read variables in any
    order. (A step compiled as a whole could not contain Horovod's operations.)
    """

    def clustered(data: Any) -> Any:
        if tf.executing_eagerly():
            return step(data)
        with tf.xla.experimental.jit_scope():
            return step(data)

    return clustered


def outside_clusters() -> contextlib.AbstractContextManager[Any]:
    """Context in which XLA compiles nothing of a step from `in_clusters`; without effect elsewhere."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.xla.experimental.jit_scope(compile_ops=False)
