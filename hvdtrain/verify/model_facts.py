"""What is known of a model and its optimizers, by which a run on several workers may differ from one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.strategies.batch_dependence import warning_by_nature

Setting = str | int | float | bool | None


def facts_of(models: Sequence[keras.Model], optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the settings, and warnings of layers that depend on the number of workers.

    Args:
        models: Built models; one that is a part of another adds nothing.
        optimizers: Their Keras optimizers.

    Returns:
        "settings": see `settings_of`; "warnings": sentences; "precision": the dtype with the fewest bits in which a
        layer computes.
    """
    parts = {id(layer) for model in models for layer in model._flatten_layers(include_self=False)}
    whole = [model for model in models if id(model) not in parts]
    layers = [layer for model in whole for layer in model._flatten_layers(include_self=False)]
    dtypes = {layer.compute_dtype for layer in layers}
    return {
        "settings": settings_of(layers, optimizers),
        "precision": next((one for one in ("bfloat16", "float16") if one in dtypes), "float32"),
        "warnings": [told for told in map(warning_by_nature, whole) if told is not None],
    }


def settings_of(layers: Sequence[Any], optimizers: Sequence[Any]) -> dict[str, Setting]:
    """Return the numbers, texts and switches in the configurations of layers and optimizers.

    Returns:
        By a name for messages, such as "rate of layer 'dropout'" or "beta_1 of the optimizer".
    """
    named = [(f"layer {layer.name!r}", layer) for layer in layers]
    # Keras numbers their names in the order in which they are made, which may differ.
    several = len(optimizers) > 1
    for number, one in enumerate(map(inner_of, optimizers), 1):
        named.append((f"optimizer {number}" if several else "the optimizer", one))
    return {f"{name} of {owner}": value for owner, one in named for name, value in _values(one)}


def _values(one: Any) -> Iterator[tuple[str, Setting]]:
    # The get_config of a script's own class may raise anything.
    with contextlib.suppress(Exception):
        config = {key: value for key, value in one.get_config().items() if key != "name"}
        yield from _leaves("", config)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name}[{number}]", inner)
    elif value is None or isinstance(value, (str, int, float, bool)):
        yield name, value
