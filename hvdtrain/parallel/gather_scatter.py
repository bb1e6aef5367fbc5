"""The whole state of a training: gathered from the ranks that hold it, and scattered to them.

State is an ordered mapping {name -> NumPy array}: the model's variables in the unsplit model's order, then the
optimizer's (iterations and learning rate, then its state for each variable), each in the shape that it has where
nothing is divided, under the path that plain Keras gives it, "optimizer" standing for the optimizer's name.
So the state of one layout fits any other.

`gather` and `scatter` know no layout, only what pieces a rank has (see state_layout.py). A variable travels from the
ranks that have its parts in blocks, and rank 0 alone holds more of it than one block beside its own.
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
"""What travels at once. MPI counts no further than 2^31, and every rank receives it."""

Place = tuple[int, int, int]
"""The position of a variable in the state: kind, number of the variable, number of its slot."""


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one variable of the unsplit training.

    Args:
        place: in the state; the same on all ranks.
        name: the variable's path.
        shape, dtype: of the whole variable.
        sends: whether the piece goes into the gathered state; a variable's pieces that do follow each other
            along `axis` in the order of ranks, and make it up. Other ranks may hold copies of them.
        elements: of the piece.
        read: returns the piece, which may be TensorFlow's own memory: who changes the variable makes a copy while
            somebody has that.
        write: takes the whole variable and keeps the piece of it.
        axis: along which the variable is divided, if it is.
        together: whether every rank that holds one reads it, in the order of places, as it is a collective of them.
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
    """One variable of the state, as all ranks know it; `senders`: (rank, elements) in the order of ranks."""

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
    """Return the whole state on the first rank, and an empty mapping on the others. A collective of all ranks.

    Args:
        pieces: what this rank holds.
        ranks: all ranks.
        entries: what `agree` has returned for such pieces; None: ask the ranks.
        memory: arrays that the result has copies in; those that are missing are made. None: what `Piece.read` returns.
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
    """Give every rank its pieces of rank 0's `state`; the other ranks' is not looked at. A collective.

    Raises:
        UsageError: on all ranks, if the state does not fit: it names the first variable and both shapes.
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
    """Return the state of a training of which this process has all."""
    own = {piece.place: piece for piece in pieces}
    return {entry.name: own[entry.place].read() for entry in merged([facts(own.values())])}


def keep_state(pieces: Iterable[Piece], state: State) -> None:
    """Give a training of which this process has all its state; `state` is empty then, to save memory."""
    for piece in sorted(pieces, key=lambda piece: piece.place):
        value = state.pop(next(iter(state)))
        assert value.shape == piece.shape, (piece, value.shape)
        piece.write(value)
    assert not state, f"not in this training: {list(state)}"


def misfit(entries: Sequence[Entry], state: Mapping[str, np.ndarray]) -> str | None:
    """Return what is wrong with `state` for this training, None if it fits."""
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
    """Return all variables of the state, from what each rank says of the pieces that it sends. A collective."""
    return merged(ranks.exchange(facts(pieces), "state"))


def facts(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return what a rank announces to the others about the pieces that it sends."""
    return [
        [list(p.place), p.name, list(p.shape), p.dtype, p.axis, p.elements]
        for p in pieces
        if p.sends
    ]


def merged(everyone: Sequence[Sequence[Sequence[Any]]]) -> list[Entry]:
    """Return the variables of the state in their order, each name once, from the `facts` of each rank.

    Raises:
        EngineError: the ranks' pieces do not fit together; names the variable.
    """
    found: dict[Place, Entry] = {}
    for rank, mine in enumerate(everyone):
        for place, name, shape, dtype, axis, elements in mine:
            entry = Entry(tuple(place), name, tuple(shape), dtype, axis, ((rank, elements),))
            known = found.get(entry.place)
            if known is None:
                found[entry.place] = entry
                continue
            # An automatic name may count what one rank made alone.
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
    """Models in a model may have the same paths: the second one is called path#2."""
    seen: Counter[str] = Counter()
    named = []
    for entry in entries:
        seen[entry.name] += 1
        count = seen[entry.name]
        named.append(entry if count == 1 else replace(entry, name=f"{entry.name}#{count}"))
    return named


def whole_of(parts: Sequence[Any], entry: Entry) -> np.ndarray:
    """Return the variable whose parts are `parts`, flat with its axis first, or as they lie in the variable."""
    if len(parts) == 1:
        return np.reshape(parts[0], entry.shape)
    axis, shape = entry.axis, entry.shape
    flat = np.concatenate([part if part.ndim == 1 else _flat(part, axis) for part in parts])
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(flat.reshape(moved), 0, axis))


def _flat(value: np.ndarray, axis: int) -> np.ndarray:
    """Return the elements with `axis` first: so the parts along it follow each other."""
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
    """Return rank `sender`'s `flat`, of so many elements, on the ranks that keep it. A collective of all."""
    kind = _dtype(dtype)
    if ranks.size() == 1:
        assert flat is not None
        return flat  # Not even copied.
    result = np.empty(elements if keep else 0, kind)
    block = max(1, BLOCK_BYTES // kind.itemsize)
    for begin in range(0, elements, block):
        end = min(begin + block, elements)
        values = np.empty(end - begin, kind) if flat is None else flat[begin:end]
        # Not on an accelerator, which need not have room for it.
        with tf.device("CPU:0"):
            received = ranks.broadcast(values, sender, f"hvdtrain_state_{name}")
        if keep:
            result[begin:end] = received.numpy()
    return result


def _dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a TensorFlow dtype's name; NumPy alone knows neither bfloat16 nor float8."""
    return np.dtype(getattr(ml_dtypes, name, name))
