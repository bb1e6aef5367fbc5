"""Which pieces of a training's state a rank holds: whole variables, parts of split ones, its part of sharded slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.accumulated import combined, shared_out
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals.deferred import is_waiting
from hvdtrain.keras_internals.optimizer_state import is_in_parts
from hvdtrain.keras_internals.optimizers import (
    accumulators,
    inner_of,
    is_distributed,
    optimizer_slots,
)
from hvdtrain.keras_internals.shards import Shard, shard_of
from hvdtrain.keras_internals.variables import tf_variable, unique, variable_name
from hvdtrain.parallel.state import Piece, Place
from hvdtrain.parallel.zero.optimizer import divided_state
from hvdtrain.parallel.zero.partition import Partition
from hvdtrain.parallel.zero.state import name_of_state

WEIGHTS, COMMON, SLOTS = range(3)
"""Kinds of variables, in the order of the state. Common is what an optimizer has once, such as iterations."""


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
    variables: Sequence[Any],
    optimizer: Any = None,
    sender: Sender = Sender(),
    adds_up: bool = False,
) -> list[Piece]:
    """Return what this rank holds of a model and its optimizer.

    Args:
        variables: the Keras variables of the unsplit model in its order, each whole, a shard (see
            keras.shards), or without a value, if only other ranks have it.
        optimizer: built; plain, or one that reduces gradients or shards its state. None: no optimizer.
        sender: which of the pieces are sent.
        adds_up: the sums of gradients that wait for an update (gradient accumulation) are added over
            the ranks, not averaged: each of them is weighted by its share.

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
    numbers = {id(v): number for number, v in enumerate(variables)}
    inner = inner_of(optimizer)
    partitions: Mapping[int, Partition] = divided_state(inner) if is_in_parts(optimizer) else {}
    accumulated = {id(v) for v in accumulators(optimizer)}
    slots = optimizer_slots(optimizer)
    for variable, state in slots:
        shard = shard_of(variable)
        for number, slot in enumerate(state):
            place = (SLOTS, numbers[id(variable)], number)
            sends = sender.of(shard)
            name = _name_of_state(optimizer, slot)
            if id(slot) in accumulated and is_distributed(optimizer):
                piece = _accumulator_piece(place, name, slot, shard, sends, inner, adds_up)
            elif id(slot) in partitions:
                piece = _sharded_piece(
                    place, name, slot, variable, sends, inner, partitions[id(slot)]
                )
            else:
                part = _slot_shard(variable, slot, optimizer)
                piece = _variable_piece(place, name, slot, part, sends)
            found.append(piece)
    taken = {id(tf_variable(slot)) for _, state in slots for slot in state}
    common = [v for v in unique(optimizer.variables) if id(tf_variable(v)) not in taken]
    found += [
        _variable_piece((COMMON, number, 0), _name_of_state(optimizer, v), v, None, sender.common)
        for number, v in enumerate(common)
    ]
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
    )


def _variable_piece(
    place: Place, name: str, variable: Any, shard: Shard | None, sends: bool
) -> Piece:
    def write(value: np.ndarray) -> None:
        _assign(variable, value)

    return _piece(
        place, name, variable, _shape(variable), shard, sends, tf_variable(variable).numpy, write
    )


def _sharded_piece(
    place: Place,
    name: str,
    slot: Any,
    variable: Any,
    sends: bool,
    optimizer: Any,
    partition: Partition,
) -> Piece:
    """A slot that is divided over the ranks which hold its variable; reading it is their collective."""

    def read() -> np.ndarray:
        part = tf_variable(slot).read_value()
        message = "state_{}_{}_{}".format(*place)
        (flat,) = optimizer.hvdtrain_reducer.whole([part], [variable], [message])
        return np.reshape(flat.numpy(), partition.shape)

    def write(value: np.ndarray) -> None:
        _assign(slot, partition.of(np.reshape(value, -1)))

    return _piece(place, name, slot, partition.shape, shard_of(variable), sends, read, write)


def _accumulator_piece(
    place: Place,
    name: str,
    slot: Any,
    shard: Shard | None,
    sends: bool,
    optimizer: Any,
    adds_up: bool,
) -> Piece:
    """Gradients that wait for an update: each rank has its own, one process would have their sum or mean."""
    ranks = reducer_of(optimizer).reduction.process_set

    def read() -> np.ndarray:
        return combined(slot, ranks, adds_up, "{}_{}_{}".format(*place)).numpy()

    def write(value: np.ndarray) -> None:
        _assign(slot, shared_out(value, ranks, adds_up))

    return _piece(place, name, slot, _shape(slot), shard, sends, read, write)


def _name_of_state(optimizer: Any, variable: Any) -> str:
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
        "ranks: it is not known which part of the unsplit layer's state that is. Use an optimizer that updates "
        "element by element (Adam, SGD) with split layers"
    )


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in variable.shape)


def _assign(variable: Any, value: np.ndarray) -> None:
    target = tf_variable(variable)
    with tf.device("CPU:0"):
        tensor = tf.constant(value, target.dtype)
    target.assign(tensor)
