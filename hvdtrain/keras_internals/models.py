"""What hvdtrain needs from the internals of Keras's models. Tested with Keras 3.15."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras


def is_built(model: keras.Model) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def own_non_trainable_variables(model: keras.Model) -> list[Any]:
    """Return the variables that were made non-trainable, without weights that were frozen later."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


def symbolic_inputs(model: keras.Model) -> list[Any]:
    """Return the symbolic inputs of a model, flat; [] if it has none yet."""
    return keras.tree.flatten(getattr(model, "inputs", None) or [])


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
    """Return the first of `methods` that the model's class overrides; None if it has Keras's."""
    return next(
        (m for m in methods if getattr(type(model), m) is not getattr(keras.Model, m)), None
    )


def trains_by_keras(model: keras.Model) -> bool:
    """Whether Keras's train_step trains the model: it passes the loss through optimizer.scale_loss once."""
    return overridden(model, "train_step") is None


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that train a model, each once; that with which it was compiled comes first.

    A train_step of the model's own may use others, which it or a model inside it keeps in attributes, as
    `d_optimizer` and `g_optimizer` of a GAN.
    """
    found = [getattr(model, "optimizer", None)]
    if not trains_by_keras(model):
        owners = [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]
        found += [
            one for owner in owners for one in held_in(vars(owner), keras.optimizers.Optimizer)
        ]
    return list({id(one): one for one in found if one is not None}.values())


def held_in(value: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield the instances of `kind` in a value, and in the lists, tuples and dicts that it is made of."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from held_in(item, kind)


@contextlib.contextmanager
def numbers_kept(model: keras.Model) -> Iterator[None]:
    """Put back the Python numbers that a model and its layers hold as attributes, such as a counter of steps."""
    layers = list(model._flatten_layers())
    kept = [{k: v for k, v in vars(one).items() if type(v) in (int, float)} for one in layers]
    try:
        yield
    finally:
        for layer, numbers in zip(layers, kept, strict=True):
            vars(layer).update(numbers)


def may_have_loss(model: keras.Model) -> bool:
    """Whether a compiled model can have a loss: from compile, its own methods, or layers that may add one.

    Which layers do is known only when they run; of Keras's own, those with regularizers.
    """
    own = overridden(model, "train_step", "compute_loss") is not None
    layers_own = any(not type(one).__module__.startswith("keras.") for one in children(model))
    return own or layers_own or model._compile_loss is not None or bool(model.losses)


def compares_with_labels(model: keras.Model) -> bool:
    """Whether Keras's own steps pass labels to a loss of compile."""
    own = overridden(model, "train_step", "test_step", "compute_loss")
    return own is None and model._compile_loss is not None


def keeps_rows(model: keras.Model) -> bool:
    """Whether a layer keeps the state of each row of a batch for the next one (a stateful RNN), whose size is fixed."""
    return any(getattr(layer, "stateful", False) for layer in model._flatten_layers())


def metric_names(model: keras.Model) -> list[str]:
    """Return the names under which a built model's losses and metrics appear in the logs."""
    return list(metric_results(model))


def means_of(model: keras.Model) -> list[keras.metrics.Mean]:
    """Return the metrics of a model that are means, those of compile among them."""
    compiled = getattr(model, "_compile_metrics", None)
    metrics = [*model.metrics, *(compiled.metrics if compiled is not None else [])]
    return [metric for metric in metrics if isinstance(metric, keras.metrics.Mean)]


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics by name; those of one whose result is a dict stand among the others."""
    return flat_logs(model.get_metrics_result())


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `logs` with the values of dicts in them among the others, as Keras's callbacks get them."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flat_logs(value) if isinstance(value, dict) else {name: value}
    return found


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs of an epoch, as Keras has them: the results of the model's metrics, if `logs` have their names.

    A train_step of the user's may return other names; then `logs`, of the last step, are all there is.
    """
    results, logs = metric_results(model), flat_logs(logs)
    return results if not logs or set(logs) == set(results) else logs


def values_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return the values of an evaluation as Keras does: a list in its order; one value by itself."""
    return model._flatten_metrics_in_order(logs)


def children(owner: Any) -> list[Any]:
    """Return the layers directly in a layer or model, in its order."""
    return list(owner._flatten_layers(include_self=False, recursive=False))
