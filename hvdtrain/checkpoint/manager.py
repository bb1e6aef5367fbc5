"""CheckpointManager: checkpoints for a training loop of your own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.folder import (
    Checkpoint,
    newest,
    numbered,
    require_finite,
    save,
    step_of,
    warn_unsaved,
)
from hvdtrain.checkpoint.lock import lock_kept, lock_unless_own
from hvdtrain.checkpoint.random_states import random_states, set_random_states
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank, require_equal
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.models import refresh_constants
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import accumulators
from hvdtrain.keras_internals.variables import (
    assign,
    row_states,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
    untrained,
    without,
)
from hvdtrain.parallel.gather_scatter import Piece, State, gather, scatter
from hvdtrain.parallel.state_layout import Sender, optimizer_pieces, pieces_of


class CheckpointManager:
    """Saves and restores the state of your own training loop. Every rank creates one and calls its methods.

    With the number of ranks that saved, each rank continues with exactly its own state. With a different number, all
    continue with the weights, optimizer (also a sharded one) and statistics of rank 0, new random seeds derived from
    rank 0's, and empty metrics.

    Args:
        folder: Folder for the checkpoints of this run; created and locked by rank 0.
        tracked: Models, optimizers, metrics and variables, in the same order on every rank and in every run.
        keep: Number of checkpoints to keep, at least 2.

    Raises:
        UsageError: On all ranks, if an object cannot be tracked, `keep` is too small, or another process uses the
            folder.
    """

    def __init__(self, folder: str | Path, *tracked: Any, keep: int = 2) -> None:
        require_integer("CheckpointManager: keep", keep, 2)
        for one in tracked:
            if not isinstance(one, (tf.Variable, keras.Variable)) and not hasattr(one, "variables"):
                raise UsageError(
                    f"CheckpointManager cannot save a {type(one).__name__}: pass models, optimizers, metrics and "
                    "variables. To save a number, call save(step, name=number)"
                )
        self._folder = Path(folder)
        self._name = f"folder {str(self._folder)!r}"  # In messages.
        self._tracked = tracked
        self._models = [one for one in tracked if isinstance(one, keras.Model)]
        self._keep = keep
        self._found: Checkpoint | None = None  # On rank 0, between reading and restoring.
        self._lock: int | None = None
        self._continues = False  # Whether the folder's earlier checkpoints are known.
        on_first(self._open, self._name)

    def close(self) -> None:
        """Unlock the folder for another run; the end of the process does so, too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, step: int, **position: Any) -> None:
        """Write a checkpoint. A collective.

        If it cannot be written, or the model or optimizer holds nan or inf, a warning is issued, the previous
        checkpoint stays, and the training continues.

        Args:
            step: Number of steps done so far; names the checkpoint.
            position: Values for `restore` to return: numbers, strings, arrays, and lists, tuples and dicts of these.

        Raises:
            UsageError: If `step` is not a whole number of at least 0; a model has no variables yet; the folder holds a
                checkpoint of a later step, and neither `restore` nor `latest` has been called.
        """
        self._found = None
        step = _whole_number(step)
        if not self._continues:
            on_first(lambda: self._require_none_after(step), self._name)
            self._continues = True
        own = {
            "untracked": [v.numpy() for v in self._untracked()],
            "variables": [tf_variable(v).numpy() for v in self._own()],
            "waiting": any(np.any(tf_variable(v).numpy()) for v in self._waiting()),
            "position": position,
        }
        ranks = ALL_RANKS.exchange(own | random_states(), "checkpoint_saved")
        arrays = gather(self._pieces())
        # All ranks wait: if one exits with an error code, the launcher ends rank 0 before it has written.
        on_first(lambda: self._write(step, arrays, ranks), self._name)

    def _write(self, step: int, arrays: State, ranks: list[Any]) -> None:
        constant = untrained(v for model in self._models for v in model.variables)
        try:
            require_finite(self._trained(arrays), constant)
            self._lock = lock_kept(self._folder, self._name, self._lock)
            save(self._folder, step, Checkpoint({"step": step}, arrays, ranks), self._keep)
        except OSError as error:
            warn_unsaved(step, error)

    def latest(self) -> dict[str, Any] | None:
        """Read the newest undamaged checkpoint without restoring anything. A collective.

        Returns:
            The values that rank 0 passed to `save`, with "step"; None if there is no checkpoint.

        Raises:
            UsageError: On all ranks, if all checkpoints are damaged.
        """
        self._found, self._continues = None, True
        position: dict[str, Any] | None = on_first(self._read, self._name)
        return position

    def restore(self) -> dict[str, Any] | None:
        """Restore all tracked objects from the newest undamaged checkpoint. A collective.

        Returns:
            The values that this rank passed to `save`, with "step" (those of rank 0 if the number of ranks has
            changed); None if there is no checkpoint.

        Raises:
            UsageError: On all ranks, if the variables differ from the saved ones, all checkpoints are damaged, or the
                number of ranks has changed and the checkpoint was saved in the middle of gradient accumulation.
        """
        if not any_rank(self._found is not None, "checkpoint_is_read") and self.latest() is None:
            return None
        pieces = self._pieces()
        facts = [[piece.name, list(piece.shape)] for piece in pieces]
        require_equal({"tracked": facts}, "CheckpointManager")
        on_first(lambda: self._require_same(facts), self._name)
        found, self._found = self._found, None
        scatter(pieces, None if found is None else found.arrays)
        what = None if found is None else (found.facts["step"], found.ranks)
        step, ranks = ALL_RANKS.exchange(what, "checkpoint_restored")[0]
        alike = len(ranks) == ALL_RANKS.size()
        if not alike and any(one["waiting"] for one in ranks):
            raise UsageError(
                f"the checkpoint of step {step} was saved in the middle of gradient accumulation: resume with "
                f"{len(ranks)} workers, as before, or save only right after an update"
            )
        own = ranks[ALL_RANKS.rank() if alike else 0]
        if alike:
            assign(self._own(), own["variables"])
        else:
            assign(self._untracked(), own["untracked"])
            self._make_own()
        for model in self._models:
            refresh_constants(model)
        set_random_states(own)
        return {"step": step, **own["position"]}

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_unless_own(self._folder, self._name)

    def _require_none_after(self, step: int) -> None:
        for path in numbered(self._folder)[:1]:
            if step_of(path) > step:
                raise UsageError(
                    f"{self._name} has a checkpoint of step {step_of(path)}, which saving step {step} "
                    "would replace: call restore() first, or choose another folder"
                )

    def _read(self) -> dict[str, Any] | None:
        self._found = newest(self._folder)
        if self._found is not None:
            if "step" not in self._found.facts:
                raise UsageError(
                    f"the checkpoints in {str(self._folder)!r} are those of a Trainer: choose another folder"
                )
            return {"step": self._found.facts["step"], **self._found.ranks[0]["position"]}
        if numbered(self._folder):
            raise UsageError(
                f"all checkpoints in {str(self._folder)!r} are damaged: move the folder away to start from scratch"
            )
        return None

    def _require_same(self, facts: Sequence[Any]) -> None:
        assert self._found is not None
        saved = [[key, list(value.shape)] for key, value in self._found.arrays.items()]
        if saved == list(facts):
            return
        what = f"{len(facts)} variables here, {len(saved)} in the checkpoint"
        for (key, shape), (old, before), piece in zip(
            facts, saved, self._named().values(), strict=False
        ):
            kind, known = (str(name).rpartition("/")[0] for name in (key, old))
            if kind != known:
                what = f"{kind!r} here, {known!r} in the checkpoint"
                break
            if shape != before:
                what = f"{piece.name!r} ({key}) has shape {shape} here, {before} in the checkpoint"
                break
        raise UsageError(
            f"the checkpoints in {str(self._folder)!r} do not match the variables here: {what}. Pass the same "
            "models and optimizers in the same order, all of them built, or choose another folder"
        )

    def _named(self) -> dict[str, Piece]:
        """Return this rank's pieces of all variables, in order, by names that are the same in every process.

        Keras's names are not: it numbers models and optimizers anew in each process.
        """
        is_first = ALL_RANKS.rank() == 0
        sender = Sender(whole=is_first, common=is_first)
        found: dict[str, Piece] = {}
        for number, one in enumerate(self._tracked):
            kind = type(one).__name__
            if is_sharded(one):
                pieces = optimizer_pieces(one, sender=sender)
            elif isinstance(one, (tf.Variable, keras.Variable)):
                pieces = pieces_of([one], sender=sender)
            else:
                pieces = pieces_of(one.variables, sender=sender)
            if isinstance(one, keras.Model) and not pieces:
                raise UsageError(
                    f"CheckpointManager: the {kind} has no variables yet: build it first, with "
                    "model.build(input_shape) or by calling it on a batch"
                )
            found |= {f"{number}/{kind}/{count}": piece for count, piece in enumerate(pieces)}
        return found

    def _pieces(self) -> list[Piece]:
        named = enumerate(self._named().items())
        return [replace(piece, name=name, place=(0, place, 0)) for place, (name, piece) in named]

    def _trained(self, arrays: State) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays of models and optimizers, with the paths of their variables."""
        for name, piece in self._named().items():
            owner = self._tracked[int(name.partition("/")[0])]
            if isinstance(owner, (keras.Model, keras.optimizers.Optimizer)):
                yield piece.name, arrays[name]

    def _own(self) -> list[Any]:
        """Return the variables that may differ between ranks."""
        found: list[Any] = []
        for one in self._tracked:
            if isinstance(one, keras.Model):
                found += without(one.variables, one.trainable_variables)
                found += row_states(one)
            elif isinstance(one, keras.metrics.Metric):
                found += one.variables
        return unique([*found, *self._waiting(), *self._untracked()])

    def _untracked(self) -> list[tf.Variable]:
        """Return the models' variables that Keras does not track, such as a counter in a layer."""
        return unique(v for model in self._models for v in untracked_variables(model))

    def _waiting(self) -> list[Any]:
        """Return the gradients accumulated for the next update."""
        optimizers = [one for one in self._tracked if isinstance(one, keras.optimizers.Optimizer)]
        return [variable for one in optimizers for variable in accumulators(one)]

    def _make_own(self) -> None:
        for one in self._tracked:
            if isinstance(one, keras.Model):
                fold_rank_into_seeds(seed_variables(one), ALL_RANKS.rank())
            elif isinstance(one, keras.metrics.Metric):
                one.reset_state()


def _whole_number(step: Any) -> int:
    """Return `step`, which may be a variable such as optimizer.iterations, as an integer."""
    try:
        number = int(step)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or not np.all(number == np.asarray(step)):
        raise UsageError(f"CheckpointManager.save: step={step!r}: pass the number of steps so far")
    return number
