"""Gradients that wait for an update (gradient accumulation): each rank has its own; a file has one process's.

With `adds_up` each rank's gradients are weighted by its share of the examples, and one process would have their
sum; else their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator, Sum
from hvdtrain.keras_internals.optimizers import accumulators
from hvdtrain.keras_internals.variables import tf_variable


def combined(variable: Any, ranks: Communicator, adds_up: bool, name: str) -> tf.Tensor:
    """Return what one process would have accumulated. A collective of `ranks`.

    Args:
        variable: this rank's accumulator.
        name: the end of the collective's.
    """
    value = tf_variable(variable).read_value()
    op = Sum if adds_up else Average
    return ranks.allreduce(value, f"hvdtrain_accumulated_{name}", op)


def shared_out(value: Any, ranks: Communicator, adds_up: bool) -> Any:
    """Return what each rank holds of what one process accumulated, so that `combined` gives it back."""
    return value / ranks.size() if adds_up else value


def share_out(optimizers: Sequence[Any], ranks: Communicator, adds_up: bool) -> None:
    """Give every rank its part of what the first rank's accumulators hold of one process. A collective."""
    for number, variable in enumerate(map(tf_variable, _accumulators(optimizers))):
        name = f"hvdtrain_accumulated_{number}"
        value = ranks.broadcast(variable.read_value(), ranks.ranks[0], name)
        variable.assign(shared_out(value, ranks, adds_up))


@contextmanager
def restored_by_first(
    optimizers: Sequence[Any], ranks: Communicator, adds_up: bool
) -> Iterator[None]:
    """Around what may restore the first rank's optimizers. A collective.

    Its accumulators are those of one process at the beginning; at the end all ranks share what they are then.
    """
    _combine(_accumulators(optimizers), ranks, adds_up)
    yield
    share_out(optimizers, ranks, adds_up)


@contextmanager
def as_one_process(optimizers: Sequence[Any], ranks: Communicator, adds_up: bool) -> Iterator[None]:
    """In this block every rank's accumulators hold what one process would have. A collective at its beginning."""
    own = _accumulators(optimizers)
    before = [tf_variable(v).numpy() for v in own]
    _combine(own, ranks, adds_up)
    try:
        yield
    finally:
        for variable, value in zip(own, before, strict=True):
            tf_variable(variable).assign(value)


def _accumulators(optimizers: Sequence[Any]) -> list[Any]:
    return [variable for optimizer in optimizers for variable in accumulators(optimizer)]


def _combine(own: Sequence[Any], ranks: Communicator, adds_up: bool) -> None:
    """Give every rank's accumulators what one process would have. A collective."""
    for number, variable in enumerate(own):
        tf_variable(variable).assign(combined(variable, ranks, adds_up, str(number)))
