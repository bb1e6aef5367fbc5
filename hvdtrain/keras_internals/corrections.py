"""Corrections of Keras classes for models that communicate; others stay as they are. Tested with Keras 3.15.

In a model that is to be compiled by XLA Horovod's operations, which have no XLA kernel, stand between the
compiled parts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from hvdtrain.keras_internals.models import overridden
from hvdtrain.keras_internals.optimizers import is_distributed


def prepare_keras() -> None:
    """Install the corrections; calling again changes nothing."""
    correct(keras.Model, "_make_function", _make_function)
    # Of the class that has it: Keras asks whether a model's own class has another one.
    correct(Trainer, "compile", _compile)


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


def _compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Horovod's examples, and so most scripts, pass an argument that TensorFlow 2.0 needed, and Keras 3 refuses."""
    kwargs.pop("experimental_run_tf_function", None)
    return original(self, *args, **kwargs)


def _make_function(original: Callable[..., Any], self: Any, step: Callable[[Any], Any]) -> Any:
    """Of a train_step or test_step that may communicate, XLA compiles all but the collectives."""
    communicates = is_distributed(self.optimizer) or overridden(self, "train_step", "test_step")
    if not (self.jit_compile and communicates):
        return original(self, step)
    self.jit_compile = False
    try:
        return original(self, in_clusters(step))
    finally:
        self.jit_compile = True


def in_clusters(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `step` for a tf.function of which XLA compiles what it can, cluster by cluster.

    It is the program that was written, in its order, however often it applies gradients and whatever it reads
    afterwards: TensorFlow finds the clusters in the finished graph. (Compiled as a whole, a step could not hold
    Horovod's operations.)
    """

    def clustered(data: Any) -> Any:
        if tf.executing_eagerly():
            return step(data)
        with tf.xla.experimental.jit_scope():
            return step(data)

    return clustered


def outside_clusters() -> contextlib.AbstractContextManager[Any]:
    """In this block of a step `in_clusters` XLA compiles nothing; elsewhere it changes nothing."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.xla.experimental.jit_scope(compile_ops=False)
