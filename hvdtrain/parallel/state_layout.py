"""Which pieces of a training's state a rank holds: whole variables, parts of split ones, its part of sharded slots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.gradient_accumulation import combined, shared_out
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals.deferred_variables import is_waiting
from hvdtrain.keras_internals.optimizer_state import is_in_parts
from hvdtrain.keras_internals.optimizers import (
    accumulators,
    inner_of,
    is_distributed,
    optimizer_slots,
)
from hvdtrain.keras_internals.shards import Shard, shard_of
from hvdtrain.keras_internals.variables import tf_variable, value_where_it_lies, variable_name
from hvdtrain.parallel.gather_scatter import Piece, Place

WEIGHTS, COMMON, SLOTS, ROUNDS = range(4)
"""Kinds of variables, in the order of the state. Common is what an optimizer has once, such as iterations; rounds are
those of ranks that train alone for some steps.
"""


@dataclass(frozen=True)
class Sender:
    """What of a rank's pieces goes into the gathered state; the defaults are those of a single process.

    Attributes:
        whole: variables that are not split, with their slots. One of the ranks that hold them sends them.
        shards: parts of split variables, with their slots.
        common: the optimizer's iterations and the like.
    """

    whole: bool = True
    shards: bool = True
    common: bool = True

    def of(self, shard: Shard | None) -> bool:
        """Whether a variable is sent of which this rank holds `shard`, or all."""
        return self.whole if shard is None else self.shards


def pieces_of(
    variables: Sequence[Any], optimizer: Any = None, sender: Sender = Sender()
) -> list[Piece]:
    """Return what this rank holds of a model and its optimizer.

    Args:
        variables: the Keras variables of the unsplit model in its order, each whole, a shard (see
            keras_internals.shards), or without a value, if only other ranks have it.
        optimizer: see `optimizer_pieces`. None: no optimizer.
        sender: which of the pieces are sent.

    Raises:
        UsageError: an optimizer's state of which it is not known how it is divided.
    """
    found = [
        _variable_piece(
            (WEIGHTS, number, 0), variable_name(v), v, shard_of(v), sender.of(shard_of(v))
        )
        for number, v in enumerate(variables)
        if not is_waiting(v)
    ]
    if optimizer is None:
        return found
    return found + optimizer_pieces(optimizer, variables, sender)


def round_pieces(variables: Sequence[tf.Variable], is_sent: bool) -> list[Piece]:
    """Return what this rank holds of `variables`, which are whole and equal on all ranks."""
    return [
        _variable_piece((ROUNDS, number, 0), f"rounds/{number}", variable, None, is_sent)
        for number, variable in enumerate(variables)
    ]


def optimizer_pieces(
    optimizer: Any, variables: Sequence[Any] | None = None, sender: Sender = Sender()
) -> list[Piece]:
    """Return what this rank holds of each of the optimizer's `variables`, in their order.

    Args:
        optimizer: built; plain, or one that reduces gradients or shards its state.
        variables: of the unsplit model; None: those that the optimizer trains, as this rank holds them.
        sender: which of the pieces are sent.
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
        elif is_in_parts(optimizer) and not waits:
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
    """A piece of `shape`, the whole variable's `shard`; `write` takes that piece."""
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

    read = partial(value_where_it_lies, variable)
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
    """A slot that is divided over the ranks which hold its variable; reading it is their collective."""
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
    """Gradients that wait for an update: each rank has its own, one process would have their sum or mean."""
    reduction = reducer_of(optimizer).reduction

    def read() -> np.ndarray:
        return combined(slot, reduction, "{}_{}_{}".format(*place)).numpy()

    def write(value: np.ndarray) -> None:
        _assign(slot, shared_out(value, reduction))

    return _piece(place, name, slot, _shape(slot), shard, sends, read, write)


def name_of_state(optimizer: Any, variable: Any) -> str | None:
    """Return the path of one of an optimizer's variables without the optimizer's own name, which Keras numbers
    (adam_1); None if it is not in the optimizer's name scope.
    """
    path = variable_name(variable)
    for scope in (f"{optimizer.name}/", f"{inner_of(optimizer).name}/"):
        if path.startswith(scope):
            return path.removeprefix(scope)
    return None


def _name_in_state(optimizer: Any, variable: Any) -> str:
    """The same however many optimizers a process made before."""
    own = name_of_state(optimizer, variable)
    return variable_name(variable) if own is None else f"optimizer/{own}"


def _slot_shard(variable: Any, slot: Any, optimizer: Any) -> Shard | None:
    """How an optimizer's slot for `variable` is divided: as the variable, if it has its shape."""
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
