"""The state of a sharded optimizer as whole arrays, under the names and in the order of the plain optimizer.

Save with `gathered_state` on all ranks; load with `scatter_state` into any number of ranks, or into the plain
optimizer: both functions take plain, distributed and sharded optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.optimizer_state import is_in_parts
from hvdtrain.keras_internals.optimizers import accumulators, inner_of
from hvdtrain.keras_internals.variables import tf_variable, variable_name
from hvdtrain.parallel.zero.optimizer import owners_of_state


def state_names(optimizer: Any) -> list[str]:
    """Return a name for each of optimizer.variables: its path without the optimizer's own name, such as
    "dense_kernel_momentum".

    The same for plain and sharded optimizers built on the same model, however many optimizers a process
    made before. A variable outside of the optimizer's name scope is called by its place ("variable_14").
    """
    seen: Counter[str] = Counter()
    names = []
    for place, variable in enumerate(optimizer.variables):
        name = name_of_state(optimizer, variable) or f"variable_{place}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def name_of_state(optimizer: Any, variable: Any) -> str | None:
    """Return the path of one of an optimizer's variables without the optimizer's own name, which Keras numbers
    (adam_1); None if it is not in the optimizer's name scope.
    """
    path = variable_name(variable)
    for scope in (f"{optimizer.name}/", f"{inner_of(optimizer).name}/"):
        if path.startswith(scope):
            return path.removeprefix(scope)
    return None


def gathered_state(optimizer: Any, only_first: bool = False) -> dict[str, np.ndarray]:
    """Return {name: whole array in the shape of its variable}, in the order of optimizer.variables.

    A collective of the optimizer's process set if it is sharded. What waits in gradient accumulators is
    combined over the ranks, as one process would have it.

    Args:
        optimizer: built; plain, distributed or sharded, or a LossScaleOptimizer around one.
        only_first: rank 0 of the process set gets the arrays, the others {}: they hold one array at a time.
    """
    inner = inner_of(optimizer)
    names = state_names(optimizer)
    if not is_in_parts(optimizer):
        return {n: v.numpy() for n, v in zip(names, optimizer.variables, strict=True)}
    reducer = inner.hvdtrain_reducer
    owners = owners_of_state(inner)
    accumulated = {id(v) for v in accumulators(inner)}
    keep = not only_first or inner.process_set.rank() == 0
    found = {}
    for index, (name, variable) in enumerate(zip(names, optimizer.variables, strict=True)):
        value = tf_variable(variable).read_value()
        owner = owners.get(id(variable))
        if id(variable) in accumulated:
            value = reducer.accumulated(value, owner, f"state_{index}")
        elif owner is not None:
            (value,) = reducer.whole([value], [owner], [f"state_{index}"])
            value = tf.reshape(value, owner.shape)
        if keep:
            found[name] = value.numpy()
    return found


def scatter_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Give `optimizer` the state that `gathered_state` returned. No communication: every rank has `state`.

    Args:
        optimizer: built on the same variables; plain, distributed or sharded on any number of ranks.
        state: at least the names of `state_names(optimizer)`, each with its whole array.

    Raises:
        UsageError: a name is missing, or an array has another number of elements than its variable.
    """
    names = state_names(optimizer)
    missing = [name for name in names if name not in state]
    if missing:
        raise UsageError(f"The optimizer's state lacks {missing[0]!r} ({len(missing)} in all)")
    inner = inner_of(optimizer)
    owners = owners_of_state(inner) if is_in_parts(optimizer) else {}
    for name, variable in zip(names, optimizer.variables, strict=True):
        shape = tuple(owners.get(id(variable), variable).shape)
        if np.shape(state[name]) != shape:
            raise UsageError(
                f"The optimizer's state {name!r} has shape {np.shape(state[name])}, the variable {shape}"
            )
    values = {id(v): state[name] for v, name in zip(optimizer.variables, names, strict=True)}
    if is_in_parts(optimizer):
        inner.set_whole_values([values.pop(id(v)) for v in inner.variables])
    for variable in optimizer.variables:
        if id(variable) in values:
            variable.assign(values[id(variable)])
