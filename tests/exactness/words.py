"""The words that cases are written in: Keras's names, and those of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from exactness import own_layers, own_losses, own_metrics, own_steps

import hvdtrain.keras


def functional(inputs: Any, layers: Sequence[Callable[[Any], Any]]) -> keras.Model:
    return own_steps.of_class(keras.Model, inputs, layers)


def sequential(inputs: Any, layers: Sequence[Any]) -> keras.Model:
    return keras.Sequential([inputs, *layers])


def unbuilt(inputs: Any, layers: Sequence[Any]) -> keras.Model:
    """A model that gets its variables from the first data."""
    return keras.Sequential(list(layers))


MODELS: Mapping[str, Any] = {
    "functional": functional,
    "sequential": sequential,
    "unbuilt": unbuilt,
}
PLAIN: Mapping[str, Any] = {"SyncBatchNormalization": keras.layers.BatchNormalization}
DISTRIBUTED: Mapping[str, Any] = {
    "SyncBatchNormalization": hvdtrain.keras.SyncBatchNormalization,
}
"""What is another thing in a script for several workers."""


def build(
    model: str, inputs: Any, layers: Sequence[str], ours: Mapping[str, Any] = PLAIN
) -> keras.Model:
    """Return the model that a case describes."""
    names = vars(keras.layers) | vars(own_layers) | ours | {"regularizers": keras.regularizers}
    made = [eval(text, dict(names)) for text in layers]
    if model in MODELS:
        return MODELS[model](inputs, made)
    return own_steps.of_class(getattr(own_steps, model), inputs, made)


def loss(text: str) -> Any:
    return eval(text, vars(keras.losses) | vars(own_losses)) if text else None


def metrics(text: str) -> Any:
    return eval(text, vars(keras.metrics) | vars(own_metrics)) if text else None


def optimizer(text: str) -> Any:
    return eval(text, vars(keras.optimizers) | {"schedules": keras.optimizers.schedules})


def argument(text: str) -> Any:
    """Of compile or fit: a value, callbacks, metrics."""
    return eval(text, vars(keras.callbacks) | vars(keras.metrics) | vars(own_metrics))
