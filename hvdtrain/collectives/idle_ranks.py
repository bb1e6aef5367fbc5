"""Idle ranks: ranks without an example in a step, because the batch is smaller than the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.communicator import Communicator, Min
from hvdtrain.keras_internals.variables import tf_variable


def take_over(variables: Sequence[Any], is_idle: bool, ranks: Communicator) -> None:
    """Copy `variables` from the first rank that had examples in a training step to the idle ranks. A collective.

    Counters, target networks and moving statistics change without a gradient. An idle rank has run the step on a
    filler batch, so only the other ranks have the right values.

    Args:
        variables: Variables that the step changes without a gradient; no metrics or random seeds, which differ by rank.
        is_idle: Whether this rank was idle; at least one rank was not.
        ranks: Ranks that ran the step together.
    """
    if not variables:
        return
    mine = ranks.size() if is_idle else ranks.rank()
    busy = ranks.ranks[int(ranks.allreduce(mine, "hvdtrain_first_busy", Min))]
    for number, target in enumerate(map(tf_variable, variables)):
        value = ranks.broadcast(target.read_value(), busy, f"hvdtrain_state_of_busy_{number}")
        if is_idle:
            target.assign(value)
