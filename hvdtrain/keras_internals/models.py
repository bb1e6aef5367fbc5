"""What hvdtrain needs of the inside of Keras's models. Tested with Keras 3.15."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend


def is_built(model: keras.Model) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def own_non_trainable_variables(model: keras.Model) -> list[Any]:
    """Return the variables that were made non-trainable, without weights that were frozen later."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


def computed_in_half(model: keras.Model) -> list[Any]:
    """Return the float32 weights of a built model that its layers read as float16, and so their gradients."""
    return [
        v
        for layer in model._flatten_layers()
        if layer.compute_dtype == "float16"
        for v in layer._trainable_variables
        if v._autocast and v.dtype == "float32"
    ]


def symbolic_build(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Create all variables of a compiled model, its metrics and its optimizer from the shapes of `data`."""
    model._symbolic_build(data_batch=data)


def symbolic_call(model: keras.Model, x: Any) -> Any:
    """Return the symbolic outputs of `model` for symbolic inputs; an unbuilt model is built."""
    return backend.compute_output_spec(model, x, training=False)


def compile_config(model: keras.Model) -> dict[str, Any]:
    """Return the arguments with which a model was compiled, except the optimizer; {} if it was not."""
    return dict(model._compile_config.config) if model.compiled and model._compile_config else {}


def compile_alike(model: keras.Model, other: keras.Model) -> None:
    """Compile `model` with the optimizer, losses and metrics that `other` was compiled with, if it was."""
    if other.compiled:
        model.compile(**compile_config(other) | {"optimizer": other.optimizer})


def overrides(callback: keras.callbacks.Callback, method: str) -> bool:
    """Whether `callback` does something of its own in `method`."""
    return not getattr(getattr(callback, method), "_is_default", False)


def overridden(model: keras.Model, *methods: str) -> str | None:
    """Return the first of `methods` that the model's class writes anew; None if it has Keras's."""
    return next(
        (m for m in methods if getattr(type(model), m) is not getattr(keras.Model, m)), None
    )


def trains_by_keras(model: keras.Model) -> bool:
    """Whether Keras's train_step trains the model: it passes the loss through optimizer.scale_loss once."""
    return overridden(model, "train_step") is None


def has_loss(model: keras.Model) -> bool:
    """Whether a compiled model can compute a loss: from compile, its own methods, or add_loss."""
    own = overridden(model, "train_step", "compute_loss") is not None
    return own or model._compile_loss is not None or bool(model.losses)


def metric_names(model: keras.Model) -> list[str]:
    """Return the names under which a built model's losses and metrics stand in the logs."""
    return list(model.get_metrics_result())


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs of an epoch, as Keras has them: the results of the model's metrics, if `logs` have their names.

    A train_step of the user's may return other names; then `logs`, of the last step, are all there is.
    """
    results = model.get_metrics_result()
    return results if not logs or set(logs) == set(results) else logs


def values_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return the values of an evaluation as Keras does: a list in its order; one value by itself."""
    return model._flatten_metrics_in_order(logs)


def children(owner: Any) -> list[Any]:
    """Return the layers directly in a layer or model, in its order."""
    return list(owner._flatten_layers(include_self=False, recursive=False))
