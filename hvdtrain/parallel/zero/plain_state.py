"""The state of a sharded optimizer as whole arrays, with the names and order of the plain optimizer.

Save with `gathered_state` on all ranks. Load with `scatter_state`, on any number of ranks, or into a plain optimizer:
both functions accept plain, distributed and sharded optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.parallel.state_layout import name_of_state, optimizer_pieces


def state_names(optimizer: Any) -> list[str]:
    """Return a unique name for each of optimizer.variables: its path without the optimizer's own name, such as
    "dense_kernel_momentum".

    The names are the same for plain and sharded optimizers built on the same model, however many optimizers the
    process made before. A variable outside the optimizer's name scope is named by its index ("variable_14").
    """
    seen: Counter[str] = Counter()
    names = []
    for place, variable in enumerate(optimizer.variables):
        name = name_of_state(optimizer, variable) or f"variable_{place}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def gathered_state(optimizer: Any) -> dict[str, np.ndarray]:
    """Return the optimizer's state as whole arrays.

    A collective of the optimizer's process set if the optimizer is sharded or accumulates gradients; accumulated
    gradients are combined over the ranks into what a single process would hold.

    Args:
        optimizer: Built optimizer; plain, distributed or sharded, or a LossScaleOptimizer around one.

    Returns:
        {name: array of the variable's whole shape}, in the order of optimizer.variables.
    """
    pieces = optimizer_pieces(optimizer)
    return {n: piece.read() for n, piece in zip(state_names(optimizer), pieces, strict=True)}


def scatter_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set the state of `optimizer` to what `gathered_state` returned. No communication: every rank has `state`.

    Args:
        optimizer: Optimizer built on the same variables; plain, distributed or sharded over any number of ranks.
        state: Whole arrays by name, at least those of `state_names(optimizer)`.

    Raises:
        UsageError: A name is missing, or an array has another shape than its variable.
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
