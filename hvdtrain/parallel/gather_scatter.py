"""Gather the whole training state from the ranks that hold it, and scatter it to them.

The state is an ordered mapping {name -> NumPy array}: the model's variables in the order of the unsplit model, then the
optimizer's (iterations and learning rate, then the slots of each variable). Each array has the shape of the undivided
variable; its name is the variable's path in plain Keras, with "optimizer" in place of the optimizer's name. So a state
saved under one layout loads under any other.

`gather` and `scatter` know nothing of layouts, only which pieces a rank holds (see state_layout.py). Variables travel
in blocks, so that in `gather` no rank but rank 0 holds more of a variable than its own piece and one block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.errors import EngineError, UsageError

State = dict[str, np.ndarray]
BLOCK_BYTES = 64 * 2**20
"""Largest message, in bytes: every rank receives it, and MPI counts to 2^31 at most."""

Place = tuple[int, int, int]
"""Position of a variable in the state: its kind (see state_layout.py), its number, the number of its slot."""


@dataclass(frozen=True)
class Piece:
    """The part of one variable of the unsplit model or optimizer that this rank holds.

    Attributes:
        place: Position of the variable in the state; the same on all ranks.
        name: Path of the variable.
        shape, dtype: Shape and dtype of the whole variable.
        sends: Whether the piece goes into the gathered state. The pieces that do make up the variable, joined along
            `axis` in rank order; other ranks may hold copies of them.
        elements: Number of elements of the piece.
        read: Returns the piece. The array may share TensorFlow's memory; an update of the variable copies it first.
        write: Takes the whole variable and stores this rank's piece of it.
        axis: Dimension along which the variable is divided, if it is.
        together: Whether `read` is a collective of the ranks that hold a piece, so that all of them call it, in the
            order of places.
    """

    place: Place
    name: str
    shape: tuple[int, ...]
    dtype: str
    sends: bool
    elements: int
    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]
    axis: int = 0
    together: bool = True


@dataclass(frozen=True)
class Entry:
    """One variable of the state, as all ranks know it; `senders` are (rank, elements) pairs in rank order."""

    place: Place
    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    senders: tuple[tuple[int, int], ...]


def gather(
    pieces: Iterable[Piece],
    ranks: Communicator = ALL_RANKS,
    entries: Sequence[Entry] | None = None,
    memory: State | None = None,
) -> State:
    """Gather the whole state on rank 0. A collective of all ranks.

    Args:
        pieces: Pieces that this rank holds.
        ranks: Communicator of all ranks.
        entries: Result of `agree` for these pieces; None calls it.
        memory: Arrays into which the result is copied, by name; missing ones are added. None: the result may share
            the memory of the arrays that `Piece.read` returns.

    Returns:
        The state on rank 0, an empty mapping on the other ranks.

    Raises:
        EngineError: The ranks' pieces do not fit together.
    """
    own = {piece.place: piece for piece in pieces}
    state: State = {}
    here = ranks.rank()
    for number, entry in enumerate(entries or agree(own.values(), ranks)):
        piece = own.get(entry.place)
        mine = piece.read() if piece is not None and (piece.sends or piece.together) else None
        parts = []
        for sender, elements in entry.senders:
            if sender == 0:
                parts.append(mine)
                continue
            flat = _flat(mine, entry.axis) if mine is not None and here == sender else None
            name = f"gather_{number}"
            parts.append(_travel(flat, elements, entry.dtype, sender, here == 0, name, ranks))
        if here == 0:
            whole = whole_of(parts, entry)
            if memory is not None:
                if entry.name not in memory:
                    memory[entry.name] = np.empty(whole.shape, whole.dtype)
                np.copyto(memory[entry.name], whole)
                whole = memory[entry.name]
            state[entry.name] = whole
    return state


def scatter(
    pieces: Iterable[Piece],
    state: Mapping[str, np.ndarray] | None,
    ranks: Communicator = ALL_RANKS,
) -> None:
    """Write each rank's pieces of the state that rank 0 holds. A collective of all ranks.

    Args:
        pieces: Pieces that this rank holds.
        state: Whole state; ignored on the other ranks.
        ranks: Communicator of all ranks.

    Raises:
        EngineError: The ranks' pieces do not fit together.
        UsageError: On all ranks, if the state does not fit the model or optimizer; names the first variable that
            differs and its shapes.
    """
    own = {piece.place: piece for piece in pieces}
    entries = agree(own.values(), ranks)
    here = ranks.rank()
    mine = misfit(entries, state or {}) if here == 0 else None
    complaint = ranks.exchange(mine, "state_misfit")[0]
    if complaint is not None:
        raise UsageError(complaint)
    for number, entry in enumerate(entries):
        piece = own.get(entry.place)
        flat = None
        if here == 0:
            assert state is not None
            flat = _flat(np.asarray(state[entry.name], _dtype(entry.dtype)), 0)
        elements = math.prod(entry.shape)
        name, keep = f"scatter_{number}", piece is not None
        whole = _travel(flat, elements, entry.dtype, 0, keep, name, ranks)
        if piece is not None:
            piece.write(whole.reshape(entry.shape))


def local_state(pieces: Iterable[Piece]) -> State:
    """Return the state of a training that this process holds as a whole."""
    own = {piece.place: piece for piece in pieces}
    return {entry.name: own[entry.place].read() for entry in merged([facts(own.values())])}


def keep_state(pieces: Iterable[Piece], state: State) -> None:
    """Write `state` into a training that this process holds as a whole; empties `state` on the way, to save memory."""
    for piece in sorted(pieces, key=lambda piece: piece.place):
        value = state.pop(next(iter(state)))
        assert value.shape == piece.shape, (piece, value.shape)
        piece.write(value)
    assert not state, f"not in this training: {list(state)}"


def misfit(entries: Sequence[Entry], state: Mapping[str, np.ndarray]) -> str | None:
    """Return a description of the first mismatch between `entries` and `state`, or None if they fit."""
    for entry in entries:
        here = f"shape {list(entry.shape)} here"
        if entry.name not in state:
            return f"the state has no variable {entry.name!r}, which has {here}"
        shape = list(state[entry.name].shape)
        if shape != list(entry.shape):
            return f"variable {entry.name!r} has shape {shape} in the state, but {here}"
    known = {entry.name for entry in entries}
    unknown = [name for name in state if name not in known]
    if unknown:
        shape = list(state[unknown[0]].shape)
        return f"the state has a variable {unknown[0]!r} of shape {shape}, which this model or optimizer lacks"
    return None


def agree(pieces: Iterable[Piece], ranks: Communicator = ALL_RANKS) -> list[Entry]:
    """Return all variables of the state, from the pieces that each rank sends. A collective of all ranks."""
    return merged(ranks.exchange(facts(pieces), "state"))


def facts(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Describe the pieces that this rank sends, for the other ranks' `merged`."""
    return [
        [list(p.place), p.name, list(p.shape), p.dtype, p.axis, p.elements]
        for p in pieces
        if p.sends
    ]


def merged(everyone: Sequence[Sequence[Sequence[Any]]]) -> list[Entry]:
    """Return the variables of the state in order and with unique names, from the `facts` of each rank.

    Raises:
        EngineError: The ranks' pieces do not fit together; names the variable.
    """
    found: dict[Place, Entry] = {}
    for rank, mine in enumerate(everyone):
        for place, name, shape, dtype, axis, elements in mine:
            entry = Entry(tuple(place), name, tuple(shape), dtype, axis, ((rank, elements),))
            known = found.get(entry.place)
            if known is None:
                found[entry.place] = entry
                continue
            # Keras numbers automatic names per process, and one rank may have made more objects than another.
            if known != replace(entry, name=known.name, senders=known.senders):
                raise EngineError(
                    f"The ranks disagree on a variable of the state: {known}, {entry}"
                )
            found[entry.place] = replace(known, senders=known.senders + entry.senders)
    entries = [found[place] for place in sorted(found)]
    for entry in entries:
        if sum(elements for _, elements in entry.senders) != math.prod(entry.shape):
            raise EngineError(f"The parts of a variable do not make up its shape: {entry}")
    return _named_once(entries)


def _named_once(entries: Sequence[Entry]) -> list[Entry]:
    """Make names unique: nested models may repeat a path, and the second one becomes path#2."""
    seen: Counter[str] = Counter()
    named = []
    for entry in entries:
        seen[entry.name] += 1
        count = seen[entry.name]
        named.append(entry if count == 1 else replace(entry, name=f"{entry.name}#{count}"))
    return named


def whole_of(parts: Sequence[Any], entry: Entry) -> np.ndarray:
    """Join the parts of a variable, each either flat with the split axis first, or in the variable's own layout."""
    if len(parts) == 1:
        return np.reshape(parts[0], entry.shape)
    axis, shape = entry.axis, entry.shape
    flat = np.concatenate([part if part.ndim == 1 else _flat(part, axis) for part in parts])
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(flat.reshape(moved), 0, axis))


def _flat(value: np.ndarray, axis: int) -> np.ndarray:
    """Return the elements as a flat array, `axis` outermost, so that parts along it are contiguous."""
    return np.ascontiguousarray(np.moveaxis(value, axis, 0) if axis else value).reshape(-1)


def _travel(
    flat: np.ndarray | None,
    elements: int,
    dtype: str,
    sender: int,
    keep: bool,
    name: str,
    ranks: Communicator,
) -> np.ndarray:
    """Broadcast `flat` from rank `sender` in blocks; return it where `keep` is set. A collective of all ranks."""
    kind = _dtype(dtype)
    if ranks.size() == 1:
        assert flat is not None
        return flat  # Without a copy.
    result = np.empty(elements if keep else 0, kind)
    block = max(1, BLOCK_BYTES // kind.itemsize)
    for begin in range(0, elements, block):
        end = min(begin + block, elements)
        values = np.empty(end - begin, kind) if flat is None else flat[begin:end]
        # On the CPU: an accelerator may have no room for it.
        with tf.device("CPU:0"):
            received = ranks.broadcast(values, sender, f"hvdtrain_state_{name}")
        if keep:
            result[begin:end] = received.numpy()
    return result


def _dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a TensorFlow dtype's name; NumPy alone knows neither bfloat16 nor float8."""
    return np.dtype(getattr(ml_dtypes, name, name))
