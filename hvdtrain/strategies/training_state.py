"""The state of a model and its optimizers: broadcast, saved and loaded. A part of HorovodStrategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import keras

from hvdtrain.collectives.first_rank import on_first
from hvdtrain.collectives.gradient_accumulation import (
    as_one_process,
    divide_accumulators,
    restored_by_first,
)
from hvdtrain.collectives.mesh import Position
from hvdtrain.collectives.replicas import copy_variables
from hvdtrain.keras_internals.models import optimizers_of, refresh_constants
from hvdtrain.keras_internals.optimizer_state import broadcast_loaded_state
from hvdtrain.keras_internals.optimizers import accumulators
from hvdtrain.keras_internals.variables import (
    local_variables,
    optimizer_variables,
    row_states,
    seed_variables,
    untracked_variables,
    without,
)
from hvdtrain.strategies.model_file import read_model, write_model


class StateIO(Protocol):
    """How the state of a training is saved and loaded; for the methods see Strategy.

    Attributes:
        together: Whether no rank has the whole model and optimizer, so that only `save` can save them.
    """

    together: ClassVar[bool]

    def save(self, model: keras.Model, path: Path) -> None: ...

    def load(self, model: keras.Model, path: Path) -> None:
        """Load into a model whose variables, and its optimizer's, exist."""

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]: ...

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]: ...


class WholeState:
    """State of which every rank holds all: the first rank writes and reads the file."""

    together: ClassVar[bool] = False

    def __init__(self, position: Position) -> None:
        self._position = position

    def save(self, model: keras.Model, path: Path) -> None:
        with self.as_one_process(model):
            on_first(lambda: write_model(model, path), "save", self._position.everyone)

    def load(self, model: keras.Model, path: Path) -> None:
        on_first(lambda: read_model(model, path), "load", self._position.everyone)
        broadcast_state(model, self._position, seed_variables(model))
        divide_accumulators(optimizers_of(model))

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]:
        return as_one_process(optimizers_of(model))

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]:
        return restored_by_first(optimizers_of(model))


def broadcast_state(model: keras.Model, position: Position, left_out: Sequence[Any] = ()) -> None:
    """Broadcast a model and its optimizers, except `left_out`, from the first rank that holds each variable."""
    broadcast(shared_state(model, left_out), position)
    refresh_constants(model)
    for optimizer in optimizers_of(model):
        broadcast_loaded_state(optimizer)


def broadcast(variables: Iterable[Any], position: Position) -> None:
    """Broadcast each of `variables` from the first rank that holds the same one. A collective."""
    for ranks, held in position.by_holders(variables):
        copy_variables(held, ranks.ranks[0], ranks)


def shared_state(model: keras.Model, left_out: Sequence[Any] = ()) -> list[Any]:
    """Return the variables of a model and its optimizers that are equal on all ranks, except `left_out`."""
    own = [*local_variables(model), *row_states(model), *left_out]
    own += [v for optimizer in optimizers_of(model) for v in accumulators(optimizer)]
    found = [*model.variables, *untracked_variables(model), *optimizer_variables(model)]
    return without(found, own)
