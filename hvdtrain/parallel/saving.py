"""Save and load a training whose state is divided over the ranks, as one file of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.collectives.agreement import on_first
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import files as model_files
from hvdtrain.parallel.mesh import Position
from hvdtrain.parallel.pieces import WEIGHTS, Sender, pieces_of
from hvdtrain.parallel.state import Piece, State, gather, keep_state, local_state, scatter
from hvdtrain.parallel.unsplit import Unsplit
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.model_file import read_model, write_model


class DividedStrategy(HorovodStrategy):
    """Horovod's strategy for state that lies in parts on several ranks: of the optimizer, or also of the model.

    Attributes:
        position: in the mesh; None: all ranks hold the same model, and only the optimizer's state is in parts.
        unsplit: the model before it was divided; None: it is whole.
    """

    several_optimizers: ClassVar[bool] = False
    saves_together: ClassVar[bool] = True
    position: Position | None = None
    unsplit: Unsplit | None = None

    def keep_whole(self, whole: keras.Model, part: keras.Model) -> None:
        """Remember `whole` before it is divided; let nobody take this rank's `part` of it for all."""
        self.unsplit = Unsplit(whole)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise UsageError(
                "This rank has only a part of the model: save all of it with Trainer.save, which every rank calls, "
                "with run_dir, or with Keras's ModelCheckpoint"
            )

        for method in ("save", "save_weights", "export", "load_weights"):
            object.__setattr__(part, method, refuse)

    def pieces(self, model: keras.Model) -> list[Piece]:
        """Return what this rank holds of the training's state: see parallel.state."""
        variables = model.variables if self.unsplit is None else self.unsplit.variables
        optimizer = model.optimizer if model.optimizer.built else None
        return pieces_of(variables, optimizer, self._sender(), self.adds_up)

    def save(self, model: keras.Model, path: Path) -> None:
        if self.unsplit is None:
            super().save(model, path)
            return
        state = gather(self.pieces(model), self.ranks)
        if self.is_first:
            with self.unsplit.whole(model) as whole:
                optimizer = whole.optimizer if model.optimizer.built else None
                keep_state(pieces_of(whole.variables, optimizer), state)
                write_model(whole, path)

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]:
        return nullcontext()  # Callbacks save by `save`.

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]:
        return nullcontext()  # No callback that restores is let in.

    def load(self, model: keras.Model, path: Path) -> None:
        self.build_to_load(model)
        state: State = {}
        has_state = on_first(lambda: self._read(model, path, state), "load", self.ranks)
        scatter(_in_file(self.pieces(model), has_state), state, self.ranks)

    def _read(self, model: keras.Model, path: Path, state: State) -> bool:
        """Put what a file holds into `state`; return whether there is an optimizer's."""
        with self._whole(model) as whole:
            has_state = read_model(whole, path)
            state.update(
                local_state(_in_file(pieces_of(whole.variables, whole.optimizer), has_state))
            )
        return has_state

    def _whole(self, model: keras.Model) -> AbstractContextManager[keras.Model]:
        """A model with all variables and a plain optimizer, in this process alone."""
        return _with_plain_optimizer(model) if self.unsplit is None else self.unsplit.whole(model)

    def _sender(self) -> Sender:
        if self.position is None:
            return Sender(self.is_first, self.is_first, self.is_first)
        place = self.position
        first_copy = place.data_index == 0
        return Sender(first_copy and place.tensor_index == 0, first_copy, self.is_first)


def _in_file(pieces: Iterable[Piece], has_state: bool) -> list[Piece]:
    """The pieces whose variables are in a .keras file: no random seeds, and the optimizer's if it was saved."""
    return [
        p
        for p in pieces
        if "seed_generator_state" not in p.name and (has_state or p.place[0] == WEIGHTS)
    ]


@contextmanager
def _with_plain_optimizer(model: keras.Model) -> Iterator[keras.Model]:
    sharded = model.optimizer
    with tf.device("CPU:0"):
        plain = model_files.plain_optimizer(sharded)
        plain.build(model.trainable_variables)
    model.optimizer = plain
    try:
        yield model
    finally:
        model.optimizer = sharded
