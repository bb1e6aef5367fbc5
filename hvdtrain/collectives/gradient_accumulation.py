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

from hvdtrain.collectives.communicator import Adasum, Average, Sum
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.keras_internals.optimizers import accumulators, inner_of, optimizer_slots
from hvdtrain.keras_internals.variables import tf_variable, values_kept


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


def common_accumulators(optimizers: Sequence[Any]) -> list[tf.Variable]:
    """Return the accumulators of distributed optimizers, without those of local variables."""
    return [variable for variable, _ in _waiting(optimizers)]


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
    found = []
    for optimizer in optimizers:
        own = {id(v) for v in accumulators(optimizer)}
        inner = inner_of(optimizer)
        for variable, slots in optimizer_slots(optimizer):
            if not inner.hvdtrain_reducer.is_local(variable):
                reduction = inner.hvdtrain_accumulated
                found += [(tf_variable(s), reduction) for s in slots if id(s) in own]
    return found


def _combine(optimizers: Sequence[Any]) -> None:
    """Set every rank's accumulators to what one process would have. A collective."""
    for number, (variable, reduction) in enumerate(_waiting(optimizers)):
        variable.assign(combined(variable, reduction, str(number)))
