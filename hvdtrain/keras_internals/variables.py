"""Variables of models and optimizers, listed by kind: replicated, local, seeds, metric states and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from hvdtrain.keras_internals.models import held_in, optimizers_of
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import accumulators, inner_of, optimizer_slots


def tf_variable(variable: Any) -> tf.Variable:
    """Return the tf.Variable inside a Keras variable; other variables unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def identity(variable: Any) -> int:
    """Return the id() of the tf.Variable that `variable` is or holds, the same for both."""
    # Not of its value, which may be made anew for each reader (autocast, variables in parts).
    held = variable._value if isinstance(variable, keras.Variable) else variable
    return id(variable if held is None else held)


def identities(variables: Iterable[Any]) -> set[int]:
    """Return the `identity` of each of `variables`."""
    return {identity(variable) for variable in variables}


def exchange_value(variable: Any, value: Any) -> None:
    """Give a Keras variable another tf.Variable: `value` itself, or one made of it on the current device.

    It takes the key of the former one, by which optimizers know the variable: its state, exclude_from_weight_decay.
    """
    key = variable._value._unique_id
    variable._initialize(value)
    variable._value._unique_id = key


def make_again(variable: Any) -> None:
    """Recreate the tf.Variable inside a Keras variable, with its value, on the current device."""
    if variable._value is not None:
        exchange_value(variable, variable._value.numpy())


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign to each of `variables` its value, in the variable's dtype."""
    for variable, value in zip(map(tf_variable, variables), values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


@contextlib.contextmanager
def values_kept(variables: Iterable[Any]) -> Iterator[None]:
    """Give each of `variables` its present value again when the block ends."""
    targets = [tf_variable(v) for v in unique(variables)]
    values = [target.numpy() for target in targets]
    try:
        yield
    finally:
        assign(targets, values)


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all optimizers of a model."""
    return [v for optimizer in optimizers_of(model) for v in optimizer.variables]


def shared_memory_value(variable: Any) -> np.ndarray:
    """Return a variable's value as an array that may share TensorFlow's memory; see `Piece.read`."""
    value = tf_variable(variable).value()  # read_value() takes three times as long.
    # np.asarray does not convert scalar tensors of dtypes that NumPy lacks (bfloat16).
    return np.asarray(value if value.shape.rank else value.numpy())


def variable_name(variable: Any) -> str:
    """Return the path (Keras) or name (TensorFlow) of a variable, for messages."""
    return getattr(variable, "path", None) or variable.name


def untrained(variables: Iterable[Any]) -> set[str]:
    """Return the names of the non-trainable variables in `variables`, such as moving statistics."""
    return {variable_name(v) for v in variables if not v.trainable}


def unique(variables: Iterable[Any]) -> list[Any]:
    """Return the variables without duplicates, in order of first occurrence."""
    return list({identity(v): v for v in variables}.values())


def without(variables: Iterable[Any], left_out: Iterable[Any]) -> list[Any]:
    """Return `variables` without duplicates and without those in `left_out`."""
    known = identities(left_out)
    return [v for v in unique(variables) if identity(v) not in known]


def bytes_of(variables: Iterable[Any]) -> int:
    """Return the memory of Keras's or TensorFlow's variables in bytes; a variable counts once."""
    once = {id(v): v for v in map(tf_variable, variables)}
    return sum((v.shape.num_elements() or 0) * v.dtype.size for v in once.values())


def seed_variables(model: keras.Model) -> list[Any]:
    """Return the states of the model's random seed generators (dropout and the like)."""
    return seeds_among(model.variables)


def seeds_among(variables: Iterable[Any]) -> list[Any]:
    """Return those of `variables` that are the states of random seed generators."""
    return [v for v in variables if "seed_generator_state" in variable_name(v)]


def global_seed_variable(create: bool) -> Any:
    """Return the state of Keras's global seed generator, for operations without a seed.

    Args:
        create: Create the generator if there is none; otherwise return None.
    """
    if create:
        return seed_generator.global_seed_generator().state
    found = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if found is None else found.state


def row_states(model: keras.Model) -> list[Any]:
    """Return the states that stateful RNNs keep for each row of a batch, which differ between workers."""
    found = [
        layer.states
        for layer in model._flatten_layers()
        if getattr(layer, "stateful", False) and getattr(layer, "states", None) is not None
    ]
    return [v for v in keras.tree.flatten(found) if isinstance(v, keras.Variable)]


def untracked_variables(model: keras.Model) -> list[tf.Variable]:
    """Return the numeric tf.Variables in attributes of the model's layers (also in tf.Modules): Keras ignores them."""
    kinds = (tf.Variable, tf.Module)
    held = [one for layer in model._flatten_layers() for one in held_in(vars(layer), kinds)]
    found = unique(
        v for one in held for v in (one.variables if isinstance(one, tf.Module) else [one])
    )
    return [v for v in found if v.dtype.is_floating or v.dtype.is_integer]


def replicated_variables(
    model: keras.Model | None = None, optimizer: Any = None, local: Iterable[Any] = ()
) -> list[Any]:
    """Return the variables that are the same on all ranks: weights, statistics, optimizer state.

    Without the states of seed generators and stateful RNNs, accumulated gradients and the state of a sharded
    optimizer, which differ between ranks on purpose.

    Args:
        model: Model whose variables are included.
        optimizer: Optimizer whose variables are included. Default: the model's optimizers, as far as they are built.
        local: Variables that belong to one rank alone, which are left out with their optimizer state.
    """
    own = identities(local)
    found: list[Any] = []
    if model is not None:
        own |= identities([*seed_variables(model), *row_states(model)])
        found += model.variables
    for one in _optimizers(model, optimizer):
        found += list(one.variables)
        parts = is_sharded(one)
        owners = [(parts or identity(v) in own, state) for v, state in optimizer_slots(one)]
        slots = [s for is_own, state in owners if is_own for s in state]
        own |= identities([*slots, *accumulators(one)])
    return [v for v in unique(found) if identity(v) not in own]


def trained_variables(model: keras.Model, local: Iterable[Any] = ()) -> list[Any]:
    """Return the replicated variables that are equal after every step: trainable weights and optimizer state.

    Args:
        model: A built and compiled model.
        local: Variables that belong to one rank alone, in addition to those of `register_local_var`.
    """
    trained = identities([*model.trainable_variables, *optimizer_variables(model)])
    common = replicated_variables(model, local=[*local, *local_variables(model)])
    return [v for v in common if identity(v) in trained]


def local_variables(model: keras.Model | None, optimizer: Any = None) -> list[Any]:
    """Return the variables whose gradients stay on their rank: of `optimizer`, or of the model's optimizers and tapes.

    Args:
        model: Model, or None.
        optimizer: Optimizer. None: those of the model.
    """
    inner = [inner_of(one) for one in _optimizers(model, optimizer)]
    taped = [] if model is None else [v for v, tape in taped_variables(model) if tape.is_local(v)]
    return [v for one in inner for v in getattr(one, "local_variables", ())] + taped


def mark_taped(sources: Iterable[Any], reducer: Any) -> None:
    """Note on those `sources` of a tape that are variables that `reducer` reduces their gradients."""
    for variable in map(tf_variable, sources):
        if isinstance(variable, tf.Variable):
            variable.hvdtrain_tape_reducer = reducer


def taped_variables(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return the trainable variables of a model whose gradients a DistributedGradientTape reduces, with its reducer."""
    marks = [
        (v, getattr(tf_variable(v), "hvdtrain_tape_reducer", None))
        for v in model.trainable_variables
    ]
    return [(variable, reducer) for variable, reducer in marks if reducer is not None]


def _optimizers(model: keras.Model | None, optimizer: Any) -> list[Any]:
    if optimizer is not None:
        return [optimizer]
    return [] if model is None else optimizers_of(model)


def computed_in_half(model: keras.Model) -> frozenset[int]:
    """Return the id() of the tf.Variables of a model's float32 weights that its layers cast to float16."""
    return frozenset(
        identity(v)
        for layer in model._flatten_layers()
        if layer.compute_dtype == "float16"
        for v in layer._trainable_variables
        if v._autocast and v.dtype == "float32"
    )
