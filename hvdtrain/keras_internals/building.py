"""Creation of a model's variables before its first step, in which Keras would create them. Tested with Keras 3.15.

Ranks compare and broadcast their variables before training, so these must exist by then. Keras builds the model
symbolically. A model for which that is impossible (it has a train_step and no `call`, or several optimizers, or runs
code eagerly that cannot be in a graph) rehearses a step instead: the step is traced, or run on zeros, without
assignments to variables and without updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import (
    children,
    has_own_loss,
    optimizers_of,
    overridden,
    trains_by_keras,
)
from hvdtrain.keras_internals.optimizers import gradients_taken


def build_model(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Create all variables of a compiled model, its metrics and its optimizers from the shapes of `data`.

    Args:
        model: A compiled model.
        data: (x[, y[, sample_weight]]), as symbolic Keras tensors.

    Raises:
        UsageError: The model has no loss.
    """
    require_loss(model, model, data)
    optimizers = optimizers_of(model)
    if len(optimizers) > 1 or overridden(model, "call") is None:
        _rehearse(model, data)
    else:
        try:
            model._symbolic_build(data_batch=data)
        except Exception:
            if trains_by_keras(model) and not model.run_eagerly:
                raise
            # If the model has an error, the rehearsed step raises it in its own terms.
            _rehearse(model, data)
    # Keras sets this when a model is called, and does not save a model without it.
    model.built = model.built or all(layer.built for layer in children(model))
    if len(optimizers) == 1 and not optimizers[0].built:
        optimizers[0].build(model.trainable_variables)


def symbolic_call(model: keras.Model, x: Any) -> Any:
    """Return the symbolic outputs of `model` for symbolic inputs; builds the model if it is not built."""
    return backend.compute_output_spec(model, x, training=False)


def require_loss(compiled: keras.Model, whole: keras.Model, data: Any) -> None:
    """Raise UsageError if a model has no loss.

    Args:
        compiled: The model, or a compiled part of it.
        whole: The whole model.
        data: As in `build_model`.
    """
    if not (has_own_loss(compiled) or _adds_loss(whole, data)):
        raise UsageError("The model has no loss: pass Trainer a loss, such as loss='mse'")


def _adds_loss(model: keras.Model, data: Any) -> bool:
    """Whether calling the model adds a loss; True if that is unknown, as it can only be called in a step."""
    found: list[Any] = []
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)

    def call(x: Any) -> Any:
        with backend.StatelessScope(collect_losses=True):
            outputs = model(x, training=True)
            found.extend(model.losses)
        return outputs

    try:
        backend.compute_output_spec(call, x)
    except Exception:
        return True
    return bool(found)


def _rehearse(model: keras.Model, data: Any) -> None:
    """Run or trace the model's train_step so that it creates its variables, without changing any."""
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
    """Ignore assignments to Keras variables in this block; new variables get their initial values."""
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
