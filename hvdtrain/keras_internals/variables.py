"""The variables of models and optimizers: which is which, and each listed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras_internals.optimizers import accumulators, inner_of, optimizer_slots


def tf_variable(variable: Any) -> tf.Variable:
    """Return the tf.Variable inside a Keras variable; other variables as they are."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_name(variable: Any) -> str:
    """Return the path (Keras) or name (TensorFlow) that an error message shows."""
    return getattr(variable, "path", None) or variable.name


def unique(variables: Iterable[Any]) -> list[Any]:
    """Return the variables without repetitions, in their first order."""
    return list({id(tf_variable(v)): v for v in variables}.values())


def without(variables: Iterable[Any], left_out: Iterable[Any]) -> list[Any]:
    """Return `variables`, each once, except those in `left_out`."""
    known = {id(tf_variable(v)) for v in left_out}
    return [v for v in unique(variables) if id(tf_variable(v)) not in known]


def seed_variables(model: keras.Model) -> list[Any]:
    """Return the states of the model's random seed generators (dropout and the like)."""
    return [v for v in model.variables if "seed_generator_state" in variable_name(v)]


def replicated_variables(
    model: keras.Model | None = None, optimizer: Any = None, local: Iterable[Any] = ()
) -> list[Any]:
    """Return the variables that all ranks hold in common: weights, statistics, optimizer state.

    Left out are the seed generators' states and accumulated gradients, which differ by rank on purpose.

    Args:
        model: its variables.
        optimizer: its variables; default the model's optimizer, if it is built.
        local: variables that belong to one rank alone, left out with their optimizer state.
    """
    own = {id(tf_variable(v)) for v in local}
    found: list[Any] = []
    if model is not None:
        own |= {id(tf_variable(v)) for v in seed_variables(model)}
        found += model.variables
        optimizer = optimizer or getattr(model, "optimizer", None)
    if optimizer is not None:
        found += list(optimizer.variables)
        slots = [
            s for v, state in optimizer_slots(optimizer) if id(tf_variable(v)) in own for s in state
        ]
        own |= {id(tf_variable(v)) for v in [*slots, *accumulators(optimizer)]}
    return [v for v in unique(found) if id(tf_variable(v)) not in own]


def trained_variables(model: keras.Model, local: Iterable[Any] = ()) -> list[Any]:
    """Return the replicated variables that every step must leave equal: weights and optimizer state.

    Args:
        model: a built and compiled model.
        local: variables that belong to one rank alone, besides those of `register_local_var`.
    """
    trained = {id(tf_variable(v)) for v in [*model.trainable_variables, *model.optimizer.variables]}
    common = replicated_variables(model, local=[*local, *local_variables(model)])
    return [v for v in common if id(tf_variable(v)) in trained]


def local_variables(model: keras.Model | None, optimizer: Any = None) -> list[Any]:
    """Return the variables that were given to the distributed optimizer's `register_local_var`."""
    optimizer = optimizer or getattr(model, "optimizer", None)
    inner = inner_of(optimizer)
    return list(getattr(inner, "local_variables", ()))
