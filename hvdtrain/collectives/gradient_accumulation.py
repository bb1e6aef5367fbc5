"""Accumulated gradients: conversion between each rank's accumulators and those of one process, which files hold.

One process would have accumulated the sum of the ranks' accumulators if their gradients are weighted by the ranks'
shares of the examples, and otherwise the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Adasum, Average, Communicator, Sum
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.keras_internals.optimizers import accumulators, inner_of, optimizer_slots
from hvdtrain.keras_internals.variables import identities, identity, tf_variable, values_kept


def combined(variable: Any, reduction: Reduction, name: str) -> tf.Tensor:
    """Return what one process would have accumulated. A collective of the reduction's ranks.

    Args:
        variable: Accumulator of this rank.
        reduction: The optimizer's `hvdtrain_accumulated`.
        name: Last part of the collective's name.
    """
    value = tf_variable(variable).read_value()
    op = Sum if reduction.weighted else Average
    return reduction.process_set.allreduce(value, f"hvdtrain_accumulated_{name}", op)


def divided_accumulators(value: Any, reduction: Reduction) -> Any:
    """Return each rank's part of `value`, which one process accumulated: the inverse of `combined`."""
    return value / reduction.process_set.size() if reduction.weighted else value


def divide_accumulators(optimizers: Sequence[Any]) -> None:
    """Divide the first rank's accumulators, which hold one process's gradients, over all ranks. A collective."""
    for number, (variable, reduction) in enumerate(_waiting(optimizers)):
        ranks, name = reduction.process_set, f"hvdtrain_accumulated_{number}"
        value = ranks.broadcast(variable.read_value(), ranks.ranks[0], name)
        variable.assign(divided_accumulators(value, reduction))


def share_accumulators(optimizers: Sequence[Any]) -> None:
    """Give all ranks the same accumulators, from which they make the same update as from their own. A collective.

    So a file that one rank writes holds the gradients of all. Does nothing right after an update, nor with Adasum,
    whose result depends on more than their sum. For gradients that are not weighted, as in model.fit.
    """
    for optimizer in optimizers:
        inner = inner_of(optimizer)
        steps = inner.gradient_accumulation_steps or 1
        if int(inner._iterations) % steps and inner.hvdtrain_reducer.reduction.op != Adasum:
            for number, (variable, reduction) in enumerate(_waiting([optimizer])):
                # A Trainer may have left it weighted.
                plain = replace(reduction, weighted=False)
                variable.assign(combined(variable, plain, str(number)))


def spread_accumulators(
    optimizers: Sequence[Any], root: int = 0, ranks: Communicator = ALL_RANKS
) -> None:
    """Give all ranks the mean of the accumulators of those that have trained as far as rank `root`. A collective.

    Does nothing if all have: then the accumulators differ, and belong together. Others have joined an elastic job, or
    have not loaded the file that the root has.

    Args:
        optimizers: Optimizers, the same ones on all ranks.
        root: Index of a rank that has trained furthest.
        ranks: Ranks that train together.
    """
    steps = [int(inner_of(one)._iterations) for one in optimizers]
    everyone = ranks.exchange(steps, "iterations")
    as_far = [theirs == everyone[root] for theirs in everyone]
    if all(as_far):
        return
    share = 1.0 / sum(as_far) if as_far[ranks.rank()] else 0.0
    for number, variable in enumerate(common_accumulators(optimizers)):
        mine = tf.math.multiply_no_nan(variable.read_value(), tf.cast(share, variable.dtype))
        variable.assign(ranks.allreduce(mine, f"hvdtrain_accumulated_{number}"))


def common_accumulators(optimizers: Sequence[Any]) -> list[tf.Variable]:
    """Return the accumulators of optimizers, without those of local variables."""
    found: list[tf.Variable] = []
    for optimizer in optimizers:
        own = {id(v) for v in accumulators(optimizer)}
        local = identities(getattr(inner_of(optimizer), "local_variables", ()))
        for variable, slots in optimizer_slots(optimizer):
            if identity(variable) not in local:
                found += [tf_variable(s) for s in slots if id(s) in own]
    return found


@contextmanager
def restored_by_first(optimizers: Sequence[Any]) -> Iterator[None]:
    """Context in which the first rank may restore its optimizers from a file. A collective.

    At its beginning all accumulators are set to those of one process; at its end those of the first rank are divided
    over all ranks.
    """
    _combine(optimizers)
    yield
    divide_accumulators(optimizers)


@contextmanager
def as_one_process(optimizers: Sequence[Any]) -> Iterator[None]:
    """Context in which every rank's accumulators hold what one process would have. A collective at its beginning."""
    with values_kept(common_accumulators(optimizers)):
        _combine(optimizers)
        yield


def _waiting(optimizers: Sequence[Any]) -> list[tuple[tf.Variable, Reduction]]:
    """Return the accumulators of distributed optimizers with their reductions, without those of local variables."""
    return [
        (variable, inner_of(optimizer).hvdtrain_accumulated)
        for optimizer in optimizers
        for variable in common_accumulators([optimizer])
    ]


def _combine(optimizers: Sequence[Any]) -> None:
    """Set every rank's accumulators to what one process would have. A collective."""
    for number, (variable, reduction) in enumerate(_waiting(optimizers)):
        variable.assign(combined(variable, reduction, str(number)))
