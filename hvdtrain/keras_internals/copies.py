"""Models and optimizers made again from their configurations. Tested with Keras 3.15."""

from __future__ import annotations

import random
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.optimizers import inner_of, is_scaled


def plain_class(optimizer: Any) -> type:
    """Return the class of an optimizer before it was made distributed or sharded."""
    return next(
        c
        for c in type(optimizer).__mro__
        if issubclass(c, keras.optimizers.Optimizer) and not hasattr(c, "hvdtrain_reduction")
    )


def plain_optimizer(optimizer: Any) -> Any:
    """Return a new, unbuilt optimizer of the same configuration, neither distributed nor sharded.

    Raises:
        UsageError: The optimizer cannot be recreated from its configuration.
    """
    inner = inner_of(optimizer)
    if not is_scaled(optimizer):
        optimizer = inner
    classes = [plain_class(inner), plain_class(optimizer), type(inner._learning_rate)]
    try:
        config = keras.saving.serialize_keras_object(optimizer)
        return _made(config, {c.__name__: c for c in classes})
    except Exception as error:  # A user's get_config and from_config may raise anything.
        raise UsageError(
            f"The optimizer {plain_class(optimizer).__name__} cannot be recreated from its configuration, which saving "
            "a model or state that is divided over ranks requires: give its class a get_config that returns all that "
            f"its constructor takes. Keras says: {error}"
        ) from error


def model_config(model: keras.Model) -> tuple[dict[str, Any], dict[str, type]]:
    """Return a model's configuration without its compile arguments, and its custom layer classes by name."""
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    custom = [
        type(layer)
        for layer in [model, *model._flatten_layers()]
        if not type(layer).__module__.startswith("keras.")
    ]
    return config, {c.__name__: c for c in custom}


def model_again(config: dict[str, Any], custom: dict[str, type]) -> keras.Model:
    """Return a new model from a result of `model_config`, without a change to the state of Python's `random`.

    Layers keep their names, which are in the configuration; names of variables depend on how the model is built.
    """
    state = random.getstate()
    try:
        return _made(config, custom)
    finally:
        random.setstate(state)


def _made(config: dict[str, Any], custom: dict[str, type]) -> Any:
    # Safe: the configuration was created in this process, not read from a file.
    return keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
