"""Saving and loading of sharded optimizer state through Keras. Tested with Keras 3.15.

A sharded optimizer has the methods `whole_values()` (raises UsageError outside of the block in which the parts are
gathered) and `load_whole_values(values)`, both in the order of its `variables`, and `broadcast_loaded_state()`, which
distributes the state that the first rank has loaded to all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.optimizers import inner_of, optimizer_slots


def slot_name(variable: Any, name: str) -> str:
    """Return Keras's name for the optimizer slot `name` of a Keras variable or tf.Variable."""
    if hasattr(variable, "path"):
        return f"{variable.path.replace('/', '_')}_{name}"
    sanitised = str(variable.name).replace("/", "_").replace(":", "_")
    return f"{sanitised}_{name}"


def is_sharded(optimizer: Any) -> bool:
    """Whether `optimizer`, or the one inside a LossScaleOptimizer, has state that is sharded over the ranks."""
    return hasattr(inner_of(optimizer), "whole_values")


def broadcast_loaded_state(optimizer: Any) -> None:
    """Distribute the state that the first rank has loaded into a sharded optimizer. A collective.

    Does nothing for other optimizers.
    """
    if is_sharded(optimizer):
        inner_of(optimizer).broadcast_loaded_state()


def take_state(optimizer: Any) -> tuple[list[Any] | None, list[Any]]:
    """Reset an optimizer to unbuilt; return its trained variables and the values of its state.

    Returns (None, []) for an optimizer that is not built.
    """
    if not optimizer.built:
        return None, []
    values = [variable.numpy() for variable in optimizer.variables]
    trained = list(optimizer._trainable_variables)
    for variable in optimizer.variables:
        if variable is not optimizer._iterations and variable is not optimizer._learning_rate:
            optimizer._untrack_variable(variable)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    return trained, values


def keep_state_of(optimizer: Any, variables: Iterable[Any]) -> None:
    """Let a built optimizer train only those of its variables that are in `variables`, with the state it has for them.

    Leaves an optimizer that is not built unchanged.
    """
    optimizer = inner_of(optimizer)
    before = {place: state.numpy() for place, state in _by_place(optimizer).items()}
    trained, _ = take_state(optimizer)
    if trained is None:
        return
    kept = {id(variable) for variable in variables}
    optimizer.build([variable for variable in trained if id(variable) in kept])
    for place, state in _by_place(optimizer).items():
        state.assign(before[place])


def _by_place(optimizer: Any) -> dict[tuple[int, int], Any]:
    """Return the optimizer's variables by the id of their weight (0: of none) and their number in its state."""
    slots = {
        id(slot): (id(weight), number)
        for weight, state in optimizer_slots(optimizer)
        for number, slot in enumerate(state)
    }
    common = itertools.count()
    return {slots.get(id(v)) or (0, next(common)): v for v in optimizer.variables}


def prepare_sharded_files() -> None:
    """Correct the methods of Keras that save an optimizer's variables one by one. Idempotent."""
    correct(keras.optimizers.LossScaleOptimizer, "save_own_variables", _save_scaled)
    correct(keras.optimizers.LossScaleOptimizer, "load_own_variables", _load_scaled)
    correct(legacy_h5_format, "save_optimizer_weights_to_hdf5_group", _save_in_hdf5)


def _save_scaled(original: Callable[..., Any], self: Any, store: Any) -> None:
    """Replacement of LossScaleOptimizer.save_own_variables: also saves the state of a sharded inner optimizer."""
    if not hasattr(self.inner_optimizer, "whole_values"):
        original(self, store)
        return
    own = [variable.numpy() for variable in self._variables]
    for index, value in enumerate([*own, *self.inner_optimizer.whole_values()]):
        store[str(index)] = value


def _load_scaled(original: Callable[..., Any], self: Any, store: Any) -> None:
    values = [store[key] for key in sorted(store.keys(), key=int)]
    if not hasattr(self.inner_optimizer, "load_whole_values") or len(values) != len(self.variables):
        original(self, store)
        return
    own = self._variables
    for variable, value in zip(own, values, strict=False):
        variable.assign(value)
    self.inner_optimizer.load_whole_values(values[len(own) :])


def _save_in_hdf5(original: Callable[..., Any], group: Any, optimizer: Any) -> None:
    if is_sharded(optimizer):
        raise UsageError(
            "An .h5 file cannot hold optimizer state that is spread over several ranks: save a "
            ".keras file"
        )
    original(group, optimizer)
