"""Lists the pieces of a training's state on a rank: whole variables, shards of split variables, sharded slots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.gradient_accumulation import combined, divided_accumulators
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals.deferred_variables import is_deferred
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import (
    accumulators,
    inner_of,
    is_distributed,
    optimizer_slots,
)
from hvdtrain.keras_internals.shards import Shard, shard_of
from hvdtrain.keras_internals.variables import shared_memory_value, tf_variable, variable_name
from hvdtrain.parallel.gather_scatter import Piece, Place

WEIGHTS, COMMON, SLOTS, ROUNDS = range(4)
"""Kinds of variables, in the order of the state.

COMMON are an optimizer's variables that belong to no model variable, such as iterations; ROUNDS those of local training
in rounds, see strategies.rounds.
"""


@dataclass(frozen=True)
class Sender:
    """Which of its pieces a rank sends into the gathered state; by default all, as in a single process.

    Attributes:
        whole: Variables that are not split, with their slots. One of the ranks that hold them sends them.
        shards: Parts of split variables, with their slots.
        common: The optimizer's variables that belong to no model variable, such as iterations.
    """

    whole: bool = True
    shards: bool = True
    common: bool = True

    def of(self, shard: Shard | None) -> bool:
        """Return whether this rank sends a variable of which it holds `shard` (None: all of it)."""
        return self.whole if shard is None else self.shards


def pieces_of(
    variables: Sequence[Any], optimizer: Any = None, sender: Sender = Sender()
) -> list[Piece]:
    """Return the pieces of a model and its optimizer that this rank holds.

    Args:
        variables: Keras variables of the unsplit model in its order. Each is whole, a shard (see
            keras_internals.shards), or without a value if only other ranks hold it.
        optimizer: Optimizer, as for `optimizer_pieces`; None: no optimizer.
        sender: Which of the pieces this rank sends.

    Raises:
        UsageError: If a slot of a split variable has another shape than the variable, so that it is not known how to
            divide it.
    """
    found = [
        _variable_piece(
            (WEIGHTS, number, 0), variable_name(v), v, shard_of(v), sender.of(shard_of(v))
        )
        for number, v in enumerate(variables)
        if not is_deferred(v)
    ]
    if optimizer is None:
        return found
    return found + optimizer_pieces(optimizer, variables, sender)


def round_pieces(variables: Sequence[tf.Variable], is_sent: bool) -> list[Piece]:
    """Return the pieces of the variables of local training in rounds.

    Args:
        variables: Variables that are whole and equal on all ranks.
        is_sent: Whether this rank sends them.
    """
    return [
        _variable_piece((ROUNDS, number, 0), f"rounds/{number}", variable, None, is_sent)
        for number, variable in enumerate(variables)
    ]


def optimizer_pieces(
    optimizer: Any, variables: Sequence[Any] | None = None, sender: Sender = Sender()
) -> list[Piece]:
    """Return the pieces of each of the optimizer's `variables` that this rank holds, in their order.

    Args:
        optimizer: Built optimizer; plain, or one that reduces gradients or shards its state.
        variables: Variables of the unsplit model. None: those that the optimizer trains, as this rank holds them.
        sender: Which of the pieces this rank sends.

    Raises:
        UsageError: As for `pieces_of`.
    """
    slots = optimizer_slots(optimizer)
    trained = [v for v, _ in slots] if variables is None else variables
    numbers = {id(v): number for number, v in enumerate(trained)}
    owners = {
        id(slot): (variable, (SLOTS, numbers[id(variable)], number))
        for variable, state in slots
        for number, slot in enumerate(state)
    }
    accumulated = {id(v) for v in accumulators(optimizer)}
    common = itertools.count()
    found = []
    for state in optimizer.variables:
        name = _name_in_state(optimizer, state)
        if id(state) not in owners:
            place = (COMMON, next(common), 0)
            found.append(_variable_piece(place, name, state, None, sender.common))
            continue
        variable, place = owners[id(state)]
        shard = None if variables is None else shard_of(variable)
        sends = sender.of(shard)
        waits = id(state) in accumulated and is_distributed(optimizer)
        if waits and not reducer_of(optimizer).is_local(variable):
            piece = _accumulator_piece(place, name, state, shard, sends, optimizer)
        elif is_sharded(optimizer) and not waits:
            piece = _sharded_piece(place, name, state, shard, sends, variable, optimizer)
        else:
            part = _slot_shard(variable, state, optimizer) if shard else None
            piece = _variable_piece(place, name, state, part, sends)
        found.append(piece)
    return found


def _piece(
    place: Place,
    name: str,
    variable: Any,
    shape: tuple[int, ...],
    shard: Shard | None,
    sends: bool,
    read: Callable[[], Any],
    write: Callable[[np.ndarray], Any],
    together: bool = True,
) -> Piece:
    """Return a piece of `shape`, which is `shard` of the whole variable; `write` takes an array of `shape`."""
    return Piece(
        place=place,
        name=name,
        shape=shape if shard is None else shard.whole_shape(shape),
        dtype=tf.as_dtype(variable.dtype).name,
        sends=sends,
        elements=math.prod(shape),
        read=lambda: np.asarray(read()),
        write=lambda whole: write(whole if shard is None else shard.part_of(whole)),
        axis=0 if shard is None else shard.axis,
        together=together,
    )


def _variable_piece(
    place: Place, name: str, variable: Any, shard: Shard | None, sends: bool
) -> Piece:
    def write(value: np.ndarray) -> None:
        _assign(variable, value)

    read = partial(shared_memory_value, variable)
    return _piece(place, name, variable, _shape(variable), shard, sends, read, write, False)


def _sharded_piece(
    place: Place,
    name: str,
    slot: Any,
    shard: Shard | None,
    sends: bool,
    variable: Any,
    optimizer: Any,
) -> Piece:
    """Return the piece of a sharded slot; reading it is a collective of the ranks that hold its variable."""
    reducer = inner_of(optimizer).hvdtrain_reducer
    partition = reducer.partition(variable)

    def read() -> np.ndarray:
        part = tf_variable(slot).read_value()
        (flat,) = reducer.whole([part], [variable], ["state_{}_{}_{}".format(*place)])
        return np.reshape(flat.numpy(), partition.shape)

    def write(value: np.ndarray) -> None:
        _assign(slot, partition.of(np.reshape(value, -1)))

    return _piece(place, name, slot, partition.shape, shard, sends, read, write)


def _accumulator_piece(
    place: Place, name: str, slot: Any, shard: Shard | None, sends: bool, optimizer: Any
) -> Piece:
    """Return the piece of an accumulator: each rank holds its own, and reading combines them over the ranks."""
    reduction = inner_of(optimizer).hvdtrain_accumulated

    def read() -> np.ndarray:
        return combined(slot, reduction, "{}_{}_{}".format(*place)).numpy()

    def write(value: np.ndarray) -> None:
        _assign(slot, divided_accumulators(value, reduction))

    return _piece(place, name, slot, _shape(slot), shard, sends, read, write)


def _name_in_state(optimizer: Any, variable: Any) -> str:
    """Return the path of one of an optimizer's variables without the optimizer's own name, which Keras numbers."""
    path = variable_name(variable)
    for scope in (f"{optimizer.name}/", f"{inner_of(optimizer).name}/"):
        if path.startswith(scope):
            return f"optimizer/{path.removeprefix(scope)}"
    return path


def _slot_shard(variable: Any, slot: Any, optimizer: Any) -> Shard | None:
    """Return the shard of a slot for `variable`: that of the variable if their shapes agree, None for a scalar."""
    shard = shard_of(variable)
    if shard is None or not _shape(slot):
        return None
    if _shape(slot) == _shape(variable):
        return shard
    name = type(inner_of(optimizer)).__name__
    raise UsageError(
        f"{name} keeps state of shape {list(slot.shape)} for {variable_name(variable)!r}, which is split over the "
        "ranks: this state cannot be related to that of the unsplit layer. Use an optimizer that updates "
        "element by element (Adam, SGD) with split layers"
    )


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in variable.shape)


def _assign(variable: Any, value: np.ndarray) -> None:
    target = tf_variable(variable)
    with tf.device("CPU:0"):
        tensor = tf.constant(value, target.dtype)
    target.assign(tensor)
