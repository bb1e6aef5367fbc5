"""Gradients that wait for an update (gradient accumulation): each rank has its own; a file has one process's.

If each rank's gradients are weighted by its share of the examples, one process would have their sum; else their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Sum
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.keras_internals.optimizers import accumulators, inner_of, optimizer_slots
from hvdtrain.keras_internals.variables import tf_variable


def combined(variable: Any, reduction: Reduction, name: str) -> tf.Tensor:
    """Return what one process would have accumulated. A collective of the reduction's ranks.

    Args:
        variable: this rank's accumulator.
        reduction: of the gradients that it holds.
        name: the end of the collective's.
    """
    value = tf_variable(variable).read_value()
    op = Sum if reduction.weighted else Average
    return reduction.process_set.allreduce(value, f"hvdtrain_accumulated_{name}", op)


def shared_out(value: Any, reduction: Reduction) -> Any:
    """Return what each rank holds of what one process accumulated, so that `combined` gives it back."""
    return value / reduction.process_set.size() if reduction.weighted else value


def share_out(optimizers: Sequence[Any]) -> None:
    """Give every rank its part of what the first rank's accumulators hold of one process. A collective."""
    for number, (variable, reduction) in enumerate(_waiting(optimizers)):
        ranks, name = reduction.process_set, f"hvdtrain_accumulated_{number}"
        value = ranks.broadcast(variable.read_value(), ranks.ranks[0], name)
        variable.assign(shared_out(value, reduction))


@contextmanager
def restored_by_first(optimizers: Sequence[Any]) -> Iterator[None]:
    """Around what may restore the first rank's optimizers. A collective.

    Its accumulators are those of one process at the beginning; at the end all ranks share what they are then.
    """
    _combine(optimizers)
    yield
    share_out(optimizers)


@contextmanager
def as_one_process(optimizers: Sequence[Any]) -> Iterator[None]:
    """In this block every rank's accumulators hold what one process would have. A collective at its beginning."""
    before = [(variable, variable.numpy()) for variable, _ in _waiting(optimizers)]
    _combine(optimizers)
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _waiting(optimizers: Sequence[Any]) -> list[tuple[tf.Variable, Reduction]]:
    """Return the accumulators of distributed optimizers, but for gradients that stay on their rank."""
    found = []
    for optimizer in optimizers:
        own = {id(v) for v in accumulators(optimizer)}
        reducer = inner_of(optimizer).hvdtrain_reducer
        for variable, slots in optimizer_slots(optimizer):
            if not reducer.is_local(variable):
                found += [(tf_variable(s), reducer.reduction) for s in slots if id(s) in own]
    return found


def _combine(optimizers: Sequence[Any]) -> None:
    """Give every rank's accumulators what one process would have. A collective."""
    for number, (variable, reduction) in enumerate(_waiting(optimizers)):
        variable.assign(combined(variable, reduction, str(number)))
