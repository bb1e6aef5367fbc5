"""Access to the internals of Keras's optimizers. Tested with Keras 3.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

from hvdtrain.errors import EngineError, UsageError

OPTIMIZER_HOOKS = ("_backend_apply_gradients", "_clip_gradients", "_get_variable_index")


def require_hooks(optimizer_class: type) -> None:
    """Raise EngineError if this version of Keras lacks a method that the reduction overrides."""
    missing = [name for name in OPTIMIZER_HOOKS if not hasattr(optimizer_class, name)]
    if missing:
        raise EngineError(
            f"Keras {keras.__version__} has no {missing[0]} in {optimizer_class.__name__}: gradients could not "
            "be reduced. hvdtrain was tested with Keras 3.15: install that, or wrap a keras.optimizers.Optimizer."
        )


def refuse_several(optimizer: Any) -> None:
    """Raise UsageError for Keras's MultiOptimizer, which delegates updates to other optimizers."""
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UsageError(
            "MultiOptimizer passes the gradients to other optimizers before the workers' gradients are averaged: "
            "pass one optimizer for all weights; or, in a loop of your own, keep MultiOptimizer plain and "
            "take the gradients from hvdtrain.keras.DistributedGradientTape"
        )


class AppliesByKeras:
    """Optimizer mixin that checks that a user's own `apply` calls Keras's `apply`, where gradients are reduced.

    (A wrapper may let another optimizer apply the gradients, which then would not be reduced.)
    """

    hvdtrain_applied = 0
    """Number of calls of Keras's `apply`."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        before = self.hvdtrain_applied
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        if self.hvdtrain_applied == before and any(g is not None for g in grads):
            raise UsageError(
                f"The optimizer {type(self).__name__} overrides apply without passing the gradients to "
                "keras.optimizers.Optimizer.apply, where the workers' gradients are combined: call "
                "super().apply(grads, trainable_variables) there, or pass the wrapped optimizer instead"
            )
        return result

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        # Keras's apply calls this whenever it has a gradient.
        object.__setattr__(self, "hvdtrain_applied", self.hvdtrain_applied + 1)
        return super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def rate_variable(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if the rate is a schedule."""
    rate = inner_of(optimizer)._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def optimizer_slots(optimizer: Any) -> list[tuple[Any, list[Any]]]:
    """Return each trained variable with its slots: momenta, averages, accumulators."""
    inner = inner_of(optimizer)
    trained = list(getattr(inner, "_trainable_variables", ()))
    lists = [
        value
        for name, value in vars(inner).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == len(trained)
        and all(slot is None or isinstance(slot, keras.Variable) for slot in value)
    ]
    return [
        (variable, [slots[i] for slots in lists if slots[i] is not None])
        for i, variable in enumerate(trained)
    ]


def step_counts(optimizer: Any) -> list[Any]:
    """Return the state that depends only on the number of steps: `iterations`, and Nadam's product of momenta."""
    inner = inner_of(optimizer)
    products = [inner._u_product] if isinstance(inner, keras.optimizers.Nadam) else []
    return [inner.iterations, *products]


def gradient_sizes(optimizer: Any) -> list[tuple[Any, tf.Tensor]]:
    """Return each trained variable with the sizes of its gradients, if steps do not depend on them (Adam, Lion).

    They are root mean squares, or the size of a mean; of the variable's shape.
    """
    inner = inner_of(optimizer)
    if isinstance(inner, keras.optimizers.Lion):
        slots, size = inner._momentums, tf.abs
    elif isinstance(inner, keras.optimizers.Adamax):
        slots, size = inner._u, tf.abs
    else:
        slots, size = getattr(inner, "_velocities", getattr(inner, "adam_velocities", [])), tf.sqrt
    pairs = zip(getattr(inner, "_trainable_variables", ()), slots, strict=False)
    return [(variable, size(slot.value)) for variable, slot in pairs if slot is not None]


def accumulators(optimizer: Any) -> list[Any]:
    """Return the gradient accumulators, which differ between ranks; [] without gradient accumulation."""
    inner = inner_of(optimizer)
    return [v for v in getattr(inner, "_accumulated_gradients", None) or () if v is not None]


def optimizer_values_in_hdf5(path: str) -> list[Any]:
    """Return the optimizer state in a model's .h5 file, in the order of `optimizer.variables`; [] if none."""
    with h5py.File(path, "r") as file:
        if "optimizer_weights" not in file:
            return []
        return [np.array(value) for value in load_optimizer_weights_from_hdf5_group(file)]


def velocities(optimizer: Any) -> list[Any] | None:
    """Return the velocities v = m v - lr g of an optimizer; [] if it has none, None if that is unknown.

    The momenta of Muon and Adam are averages of gradients, without the learning rate.
    """
    inner = inner_of(optimizer)
    if isinstance(inner, keras.optimizers.SGD):
        return list(inner.momentums)
    if isinstance(inner, keras.optimizers.RMSprop):
        return list(inner._momentums)
    known = not getattr(inner, "momentum", 0) or isinstance(inner, keras.optimizers.Muon)
    return [] if known else None


def is_scaled(optimizer: Any) -> bool:
    """Whether `optimizer` scales the loss against underflow (mixed_float16)."""
    unit = getattr(optimizer, "hvdtrain_unit_scale", False)
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not unit


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer`, or the one inside a LossScaleOptimizer, is distributed."""
    return hasattr(optimizer, "hvdtrain_reducer") or hasattr(
        getattr(optimizer, "inner_optimizer", None), "hvdtrain_reducer"
    )


@contextlib.contextmanager
def gradients_taken(
    optimizer: Any, take: Callable[[list[tuple[Any, Any]]], bool]
) -> Iterator[None]:
    """Intercept the gradients that are passed to `apply` and `apply_gradients` of `optimizer` in this block.

    Args:
        optimizer: A Keras optimizer.
        take: Function of the (gradient, variable) pairs; if it returns False, the optimizer applies them.
    """

    def apply_gradients(grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        return None if take(pairs) else type(optimizer).apply_gradients(optimizer, pairs)

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        known = optimizer._trainable_variables
        variables = known if trainable_variables is None else trainable_variables
        taken = take(list(zip(grads, variables, strict=True)))
        return None if taken else type(optimizer).apply(optimizer, grads, trainable_variables)

    object.__setattr__(optimizer, "apply_gradients", apply_gradients)
    object.__setattr__(optimizer, "apply", apply)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "apply_gradients")
        object.__delattr__(optimizer, "apply")


def require_gradients(model: keras.Model, handed_out: list[tuple[Any, Any]]) -> None:
    """Raise UsageError if the train_step of a model with trainable weights has passed no gradients to the optimizer."""
    if model.trainable_variables and not handed_out:
        raise UsageError(
            f"The train_step of {type(model).__name__} passed no gradients to self.optimizer, so there are "
            "none to combine over the workers: call self.optimizer.apply(gradients, "
            "self.trainable_variables)"
        )
