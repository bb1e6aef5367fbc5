"""Ranks without an example in a step: a batch smaller than the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.communicator import Communicator, Min
from hvdtrain.keras_internals.variables import tf_variable


def take_over(variables: Sequence[Any], is_idle: bool, ranks: Communicator) -> None:
    """Give the ranks that were idle in a training step what `variables` are on one that was not. A collective.

    Counters, target networks and moving statistics change without a gradient. An idle rank has run the step on a
    filler; what it would have come to by examples, only the others know.

    Args:
        variables: that the step changes without a gradient, not metrics and random seeds, which are each rank's own.
        is_idle: whether this rank was; at least one was not.
        ranks: that made the step together.
    """
    if not variables:
        return
    mine = ranks.size() if is_idle else ranks.rank()
    busy = ranks.ranks[int(ranks.allreduce(mine, "hvdtrain_first_busy", Min))]
    for number, target in enumerate(map(tf_variable, variables)):
        value = ranks.broadcast(target.read_value(), busy, f"hvdtrain_state_of_busy_{number}")
        if is_idle:
            target.assign(value)
