"""The state of a sharded optimizer as whole arrays, under the names and in the order of the plain optimizer.

Save with `gathered_state` on all ranks; load with `scatter_state` into any number of ranks, or into the plain
optimizer: both functions take plain, distributed and sharded optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.parallel.state_layout import name_of_state, optimizer_pieces


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


def gathered_state(optimizer: Any) -> dict[str, np.ndarray]:
    """Return {name: whole array in the shape of its variable}, in the order of optimizer.variables.

    A collective of the optimizer's process set if it is sharded, or accumulates gradients: what waits for an update
    is combined over the ranks, as one process would have it.

    Args:
        optimizer: built; plain, distributed or sharded, or a LossScaleOptimizer around one.
    """
    pieces = optimizer_pieces(optimizer)
    return {n: piece.read() for n, piece in zip(state_names(optimizer), pieces, strict=True)}


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
    pieces = list(zip(names, optimizer_pieces(optimizer), strict=True))
    for name, piece in pieces:
        if np.shape(state[name]) != piece.shape:
            raise UsageError(
                f"The optimizer's state {name!r} has shape {np.shape(state[name])}, the variable {piece.shape}"
            )
    for name, piece in pieces:
        piece.write(np.asarray(state[name]))
