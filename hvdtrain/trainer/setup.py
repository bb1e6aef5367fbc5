"""From what the user gave Trainer to what it works with: the model, compile's arguments, the data's facts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import keras

from hvdtrain.data import Source, Spec, validation_split
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.make import check_positive
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import compile_config
from hvdtrain.keras_internals.optimizers import inner_of, refuse_several
from hvdtrain.strategies.strategy import ModelSource


def build_model(
    model: ModelSource, precision: str | None, build: Callable[[ModelSource], keras.Model]
) -> keras.Model:
    """Return the model that `build` makes of a model or a function; with `precision` if it is a function.

    Raises:
        UsageError: not a model, or a model built with another precision.
    """
    if isinstance(model, keras.Model):
        if precision is not None and model.dtype_policy.name != precision:
            raise UsageError(
                f"precision={precision!r}, but the model was built with {model.dtype_policy.name!r}: pass a function "
                "that builds the model, or call keras.config.set_dtype_policy first"
            )
        return build(model)
    if not callable(model):
        raise UsageError(
            f"model: give a keras.Model or a function that builds one, not {type(model).__name__}"
        )
    if precision is not None:
        try:
            keras.config.set_dtype_policy(precision)
        except ValueError as error:
            raise UsageError(f"precision={precision!r}: {error}") from error
    built = build(model)
    if not isinstance(built, keras.Model):
        raise UsageError(f"model: the function returned {type(built).__name__}, not a keras.Model")
    return built


def compile_arguments(
    model: keras.Model,
    optimizer: Any,
    loss: Any,
    metrics: Any,
    weighted_metrics: Any,
    loss_weights: Any,
) -> dict[str, Any]:
    """Return the arguments for model.compile; those of a compiled model where none were given."""
    given = {
        "loss": loss,
        "metrics": metrics,
        "weighted_metrics": weighted_metrics,
        "loss_weights": loss_weights,
    }
    if model.compiled:
        before = compile_config(model)
        if optimizer is None:
            optimizer = model.optimizer
        given = {k: before.get(k) if v is None else v for k, v in given.items()}
    try:
        optimizer = keras.optimizers.get("rmsprop" if optimizer is None else optimizer)
    except ValueError as error:
        raise UsageError(f"optimizer={optimizer!r}: {error}") from error
    refuse_several(inner_of(optimizer))
    return {"optimizer": optimizer, **given}


def refuse_batch_size(name: str, value: Any, workers: int) -> None:
    """Raise UsageError if the argument `name` of fit, evaluate or predict was given."""
    if value is not None:
        raise UsageError(
            f"{name}={value!r}: how many examples a step has, over all workers together, is said once: "
            f"Trainer(..., global_batch_size={value}), or {value} for each of the {workers} workers: "
            f"global_batch_size={value} * {workers}. Leave {name} out here"
        )


def check_validation_freq(value: int | Collection[int]) -> None:
    """Raise UsageError for a validation_freq that is neither a number of epochs nor a list of epochs."""
    if isinstance(value, int):
        check_positive("validation_freq", value)
    elif not isinstance(value, Collection) or not all(isinstance(epoch, int) for epoch in value):
        raise UsageError(
            f"validation_freq={value!r}: give a number, to evaluate every so many epochs, or the epochs to evaluate "
            "after, such as [1, 3]"
        )


def split_arrays(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[Any, Any]:
    """Return ((x, y, sample_weight), validation data): the last `fraction` of the arrays, before shuffling."""
    train, validation = validation_split(x, y, sample_weight, fraction)
    return (*train, None, None)[:3], validation


def symbolic_data(element: Any, examples: int) -> Any:
    """Return Keras's symbolic tensors for `examples` examples like `element` (see Source)."""
    if isinstance(element, Spec):
        text = element.dtype.startswith(("str", "bytes", "object"))
        return keras.KerasTensor((examples, *element.shape), "string" if text else element.dtype)
    if isinstance(element, dict):
        return {key: symbolic_data(item, examples) for key, item in element.items()}
    items = [symbolic_data(item, examples) for item in element]
    return items if isinstance(element, list) else tuple(items)


def evaluation_source(source: Source) -> Source:
    """Return `source`, of which evaluation counts no example twice: steps beyond the arrays' end stop there."""
    if isinstance(source, ArraySource) and source.examples > source.pass_length:
        return replace(source, steps=None)
    return source


def source_facts(source: Source) -> dict[str, Any]:
    """Return what the ranks compare about their data before they start."""
    return {
        "the number of steps in an epoch": source.steps_per_epoch,
        "the number of examples": source.examples,
        "the shape and dtype of an example": source.element,
    }
