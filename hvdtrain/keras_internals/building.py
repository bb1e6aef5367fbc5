"""Create the variables of a model before its first step, as Keras does in that step. Tested with Keras 3.15.

Ranks compare their variables and share them out before any of them trains, so these must exist by then. What a model
computes is asked of Keras symbolically. A model that cannot be asked (it has a train_step and no `call`, or several
optimizers, or runs eagerly what no graph can hold) rehearses a step instead: traced, or run on zeros, with
nothing assigned and no gradient applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from hvdtrain.keras_internals.models import (
    children,
    optimizers_of,
    overridden,
    trains_by_keras,
)
from hvdtrain.keras_internals.optimizers import gradients_taken


def build_model(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Create all variables of a compiled model, its metrics and its optimizers from the shapes of `data`.

    Args:
        model: compiled.
        data: (x[, y[, sample_weight]]) as Keras's symbolic tensors.
    """
    optimizers = optimizers_of(model)
    if len(optimizers) > 1 or overridden(model, "call") is None:
        _rehearse(model, data)
    else:
        try:
            model._symbolic_build(data_batch=data)
        except Exception:
            if trains_by_keras(model) and not model.run_eagerly:
                raise
            # What is wrong with it, if anything, is said in the terms of the step.
            _rehearse(model, data)
    # Keras sets this where a model is called, and saves none without it.
    model.built = model.built or all(layer.built for layer in children(model))
    if len(optimizers) == 1 and not optimizers[0].built:
        optimizers[0].build(model.trainable_variables)


def symbolic_call(model: keras.Model, x: Any) -> Any:
    """Return the symbolic outputs of `model` for symbolic inputs; an unbuilt model is built."""
    return backend.compute_output_spec(model, x, training=False)


def _rehearse(model: keras.Model, data: Any) -> None:
    """Let the model's train_step create what it needs, and change nothing."""
    step = model.train_step
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(gradients_taken(optimizer, _builder(optimizer)))
        if model.run_eagerly:
            stack.enter_context(_nothing_assigned())
            step(keras.tree.map_structure(_zeros, data))
        else:
            specs = keras.tree.map_structure(_spec, data)
            tf.function(step, autograph=False).get_concrete_function(specs)


def _builder(optimizer: Any) -> Callable[[list[tuple[Any, Any]]], bool]:
    def build(pairs: list[tuple[Any, Any]]) -> bool:
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build([variable for _, variable in pairs])
        return True

    return build


@contextlib.contextmanager
def _nothing_assigned() -> Iterator[None]:
    """Drop what is assigned to Keras variables in this block; new ones get their first values."""
    variable_class = backend.Variable
    assign = variable_class._direct_assign
    variable_class._direct_assign = lambda self, value: None
    try:
        yield
    finally:
        variable_class._direct_assign = assign


def _spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _zeros(tensor: keras.KerasTensor) -> tf.Tensor:
    shape = [1 if length is None else length for length in tensor.shape]
    if tensor.dtype == "string":
        return tf.fill(shape, "")
    return tf.constant(np.zeros(shape, tensor.dtype))
