"""Layers that a script freezes or unfreezes without compiling the model again.

Keras goes on to train what it trained when the step was traced, until the model is compiled or
`make_train_function(force=True)` is called. So does a Trainer, if the layers are as they were then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

Flags = list[tuple[Any, str, bool]]
"""Objects, the name of an attribute of each, and its value."""


def trained_layers(model: keras.Model) -> Flags:
    """Return which layers and weights of a model are trained now."""
    layers = list(model._flatten_layers())
    weights = [weight for layer in layers for weight in layer._trainable_variables]
    return [(layer, "_trainable", layer._trainable) for layer in layers] + [
        (weight, "trainable", weight.trainable) for weight in weights
    ]


@contextlib.contextmanager
def trained_as(flags: Flags) -> Iterator[None]:
    """Train the layers that `flags` say in this block; afterwards they are as the script has left them.

    What a callback changes meanwhile stays changed.
    """
    given = [(one, name, getattr(one, name)) for one, name, _ in flags]
    _set(flags)
    try:
        yield
    finally:
        pairs = zip(given, flags, strict=True)
        _set([was for was, (one, name, held) in pairs if getattr(one, name) == held])


def _set(flags: Flags) -> None:
    for one, name, value in flags:
        if getattr(one, name) != value:
            setattr(one, name, value)
