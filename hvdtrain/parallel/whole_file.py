"""Save and load a training whose state is divided over ranks, as one file of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.collectives.first_rank import on_first
from hvdtrain.collectives.mesh import Position
from hvdtrain.keras_internals.copies import plain_optimizer
from hvdtrain.parallel.gather_scatter import Piece, State, gather, keep_state, local_state, scatter
from hvdtrain.parallel.state_layout import WEIGHTS, Sender, pieces_of
from hvdtrain.parallel.whole_model import unsplit_of
from hvdtrain.strategies.model_file import read_model, write_model


class DividedState:
    """State of which each rank holds a part: the optimizer's, or the model's as well."""

    together: ClassVar[bool] = True

    def __init__(self, position: Position) -> None:
        self._position = position

    def save(self, model: keras.Model, path: Path) -> None:
        everyone = self._position.everyone
        state = gather(self.pieces(model), everyone)
        on_first(lambda: _write(model, path, state), "save", everyone)

    def load(self, model: keras.Model, path: Path) -> None:
        everyone = self._position.everyone
        state: State = {}
        has_state = on_first(lambda: _read(model, path, state), "load", everyone)
        scatter(_in_file(self.pieces(model), has_state), state, everyone)

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]:
        return nullcontext()  # Callbacks save with `save`.

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]:
        return nullcontext()  # Callbacks that restore weights are refused.

    def pieces(self, model: keras.Model) -> list[Piece]:
        """Return the pieces of the training's state that this rank holds; see parallel.gather_scatter."""
        variables = whole_variables(model)
        optimizer = model.optimizer if model.optimizer.built else None
        return pieces_of(variables, optimizer, self._sender())

    @property
    def _is_first(self) -> bool:
        return self._position.everyone.rank() == 0

    def _sender(self) -> Sender:
        here = self._position
        first_copy = here.data_index == 0
        return Sender(first_copy and here.tensor_index == 0, first_copy, self._is_first)


def whole_variables(model: keras.Model) -> Sequence[Any]:
    """Return the variables of the unsplit model, including those that only other ranks hold."""
    unsplit = unsplit_of(model)
    return model.variables if unsplit is None else unsplit.variables


def _write(model: keras.Model, path: Path, state: State) -> None:
    with _whole(model) as whole:
        optimizer = whole.optimizer if model.optimizer.built else None
        keep_state(pieces_of(whole.variables, optimizer), state)
        write_model(whole, path)


def _read(model: keras.Model, path: Path, state: State) -> bool:
    """Read a file into `state`; return whether it holds the optimizer's state."""
    with _whole(model) as whole:
        has_state = read_model(whole, path)
        pieces = pieces_of(whole.variables, whole.optimizer)
        state.update(local_state(_in_file(pieces, has_state)))
    return has_state


def _whole(model: keras.Model) -> AbstractContextManager[keras.Model]:
    """Return a context with the whole model and a plain optimizer, in this process alone."""
    unsplit = unsplit_of(model)
    return _with_plain_optimizer(model) if unsplit is None else unsplit.whole(model)


def _in_file(pieces: Iterable[Piece], has_state: bool) -> list[Piece]:
    """Return the pieces that a .keras file holds: no random seeds; the optimizer's only if it was saved."""
    return [
        p
        for p in pieces
        if "seed_generator_state" not in p.name and (has_state or p.place[0] == WEIGHTS)
    ]


@contextmanager
def _with_plain_optimizer(model: keras.Model) -> Iterator[keras.Model]:
    sharded = model.optimizer
    with tf.device("CPU:0"):
        plain = plain_optimizer(sharded)
        if sharded.built:
            plain.build(model.trainable_variables)
    model.optimizer = plain
    try:
        yield model
    finally:
        model.optimizer = sharded
