"""Access to the internals of Keras's models. Tested with Keras 3.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from hvdtrain.keras_internals.optimizers import gradients_taken, is_distributed


def is_built(model: keras.Model) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def refresh_constants(model: keras.Model) -> None:
    """Recompute what layers derive from their variables, after the variables were assigned."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def own_non_trainable_variables(model: keras.Model) -> list[Any]:
    """Return the variables that were created as non-trainable, without weights that were frozen later."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


def symbolic_inputs(model: keras.Model) -> list[Any]:
    """Return the symbolic inputs of a model, flat; [] if it has none yet."""
    return keras.tree.flatten(getattr(model, "inputs", None) or [])


def compile_config(model: keras.Model) -> dict[str, Any]:
    """Return the arguments with which a model was compiled; {} if it was not."""
    return dict(model._compile_config.config) if model.compiled and model._compile_config else {}


def compile_like(model: keras.Model, other: keras.Model, optimizer: Any) -> None:
    """Compile `model` with the arguments of `other`, but with `optimizer`, if `other` is compiled."""
    if other.compiled:
        model.compile(**compile_config(other) | {"optimizer": optimizer})


def overrides(callback: keras.callbacks.Callback, method: str) -> bool:
    """Whether `callback` overrides `method`."""
    return not getattr(getattr(callback, method), "_is_default", False)


def overridden(model: keras.Model, *methods: str) -> str | None:
    """Return the first of `methods` that the model's class overrides; None if it overrides none."""
    return next(
        (m for m in methods if getattr(type(model), m) is not getattr(keras.Model, m)), None
    )


def trains_by_keras(model: keras.Model) -> bool:
    """Whether the model has Keras's own train_step, which calls optimizer.scale_loss once."""
    return overridden(model, "train_step") is None


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that train a model, each once, starting with the one of compile.

    A custom train_step may use others, in attributes of the model or of a model inside it, such as `d_optimizer` and
    `g_optimizer` of a GAN.
    """
    found = [getattr(model, "optimizer", None)]
    if not trains_by_keras(model):
        owners = [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]
        found += [
            one for owner in owners for one in held_in(vars(owner), keras.optimizers.Optimizer)
        ]
    return list({id(one): one for one in found if one is not None}.values())


def distributed_optimizers(model: keras.Model) -> list[Any]:
    """Return those of `optimizers_of` that are distributed."""
    return [optimizer for optimizer in optimizers_of(model) if is_distributed(optimizer)]


@contextlib.contextmanager
def gradients_of_all_taken(
    model: keras.Model, take: Callable[[list[tuple[Any, Any]]], bool]
) -> Iterator[None]:
    """Intercept the gradients for all optimizers of `model` in this block; see `gradients_taken`."""
    with contextlib.ExitStack() as blocks:
        for optimizer in optimizers_of(model):
            blocks.enter_context(gradients_taken(optimizer, take))
        yield


def held_in(value: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield `value` if it is of `kind`, and the instances of `kind` inside lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from held_in(item, kind)


@contextlib.contextmanager
def numbers_kept(model: keras.Model) -> Iterator[None]:
    """Restore int and float attributes of a model and its layers, such as a step counter, after this block."""
    layers = list(model._flatten_layers())
    kept = [{k: v for k, v in vars(one).items() if type(v) in (int, float)} for one in layers]
    try:
        yield
    finally:
        for layer, numbers in zip(layers, kept, strict=True):
            vars(layer).update(numbers)


def has_own_loss(model: keras.Model) -> bool:
    """Whether a compiled model has a loss before it is called: from compile, its methods, or the weights."""
    own = overridden(model, "train_step", "compute_loss") is not None
    return own or model._compile_loss is not None or bool(model.losses)


def compares_with_labels(model: keras.Model) -> bool:
    """Whether the model has Keras's own steps, and these pass labels to a compiled loss."""
    own = overridden(model, "train_step", "test_step", "compute_loss")
    return own is None and model._compile_loss is not None


def keeps_rows(model: keras.Model) -> bool:
    """Whether a layer keeps states for the rows of a batch (a stateful RNN), which fixes the batch size."""
    return any(getattr(layer, "stateful", False) for layer in model._flatten_layers())


def metric_names(model: keras.Model) -> list[str]:
    """Return the names under which a built model's losses and metrics appear in the logs."""
    return list(metric_results(model))


def means_of(model: keras.Model) -> list[keras.metrics.Mean]:
    """Return the metrics of a model that are keras.metrics.Mean, including those of compile."""
    compiled = getattr(model, "_compile_metrics", None)
    metrics = [*model.metrics, *(compiled.metrics if compiled is not None else [])]
    return [metric for metric in metrics if isinstance(metric, keras.metrics.Mean)]


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics by name; results that are dicts are flattened."""
    return flat_logs(model.get_metrics_result())


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `logs` with nested dicts flattened, as Keras passes them to callbacks."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flat_logs(value) if isinstance(value, dict) else {name: value}
    return found


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs of an epoch as Keras does: the metrics' results, if `logs` is empty or has the same names.

    A custom train_step may return other names; then `logs`, from the last step, are returned.
    """
    results, logs = metric_results(model), flat_logs(logs)
    return results if not logs or set(logs) == set(results) else logs


def values_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return the values of an evaluation as Keras does: a list in Keras's order, or a single value."""
    return model._flatten_metrics_in_order(logs)


def children(owner: Any) -> list[Any]:
    """Return the direct sublayers of a layer or model, in its order."""
    return list(owner._flatten_layers(include_self=False, recursive=False))
