"""Elementwise calls: those that may stand between a column-split and a row-split layer.

Any other call (softmax, normalization, reshaping) would treat one rank's part as the whole activation.
"""

from __future__ import annotations

from typing import Any

import keras

_ACTIVATIONS = (
    *("celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu"),
    *("linear", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_shrink", "softplus"),
    *("softsign", "sparse_plus", "squareplus", "tanh", "tanh_shrink", "threshold"),
)  # fmt: skip
_LAYERS = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Identity,
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
# keras.activations applied to a tensor of a functional model are operations of these classes.
_OPERATIONS = {name.title().replace("_", "") for name in _ACTIVATIONS}


def is_elementwise_activation(activation: Any) -> bool:
    """Return whether a layer's `activation` is one of Keras's elementwise ones."""
    if type(activation) in _LAYERS:
        return True
    return any(activation is getattr(keras.activations, name) for name in _ACTIVATIONS)


def is_elementwise(operation: Any) -> bool:
    """Return whether a call of `operation` in a model's graph is elementwise.

    If it has several inputs, they must also have the same shape, which the caller checks.
    """
    if not isinstance(operation, keras.layers.Layer):
        kind = type(operation)
        return kind.__name__ in _OPERATIONS and kind.__module__.startswith("keras.src.ops.")
    if operation.activity_regularizer is not None:
        return False
    if type(operation) is keras.layers.Activation:
        return is_elementwise_activation(operation.activation)
    if type(operation) is keras.layers.Dropout:
        return operation.noise_shape is None
    return type(operation) in _LAYERS
