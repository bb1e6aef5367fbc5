"""Selects the Keras callbacks that a rank runs, and finds those that need global values after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
from keras import callbacks as kc

from hvdtrain.checkpoint.fit_callback import CheckpointCallback
from hvdtrain.errors import UsageError
from hvdtrain.keras.writers import WRITERS
from hvdtrain.keras_internals.models import overrides
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.trainer.learning_rate_scaling import WarmUp

TRAIN_METHODS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_METHODS = ("on_test_batch_begin", "on_test_batch_end")


def callbacks_of_rank(
    callbacks: Sequence[keras.callbacks.Callback], is_first: bool, saves_together: bool = False
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs: all on rank 0, only those that write nothing on the others.

    Args:
        callbacks: The user's callbacks, the same list on every rank.
        is_first: Whether this is rank 0.
        saves_together: Whether no rank holds the whole model and optimizer. If so, ModelCheckpoint runs on every rank,
            with the model that `saving_together` gives it.

    Raises:
        UsageError: If a callback cannot save a divided model or optimizer, or is for `model.fit` only.
    """
    if any(isinstance(callback, CheckpointCallback) for callback in callbacks):
        raise UsageError(
            "CheckpointCallback is for model.fit: a Trainer saves more with "
            "checkpoints=hvdtrain.Checkpoints(every_steps=...)"
        )
    for callback in callbacks if saves_together else ():
        if isinstance(callback, kc.BackupAndRestore | kc.OrbaxCheckpoint):
            raise UsageError(
                f"{type(callback).__name__} cannot save a model or optimizer that is divided over ranks: "
                "use ModelCheckpoint, and Trainer.load before fit to resume"
            )
        if isinstance(callback, kc.SwapEMAWeights):
            raise UsageError(
                "SwapEMAWeights cannot swap the averages of a model or optimizer that is divided "
                "over ranks: leave it out, or do not divide them"
            )
        if isinstance(callback, kc.ModelCheckpoint) and not is_first:
            callback.verbose = 0
    left_out = [] if is_first else written_by_first(callbacks, saves_together)
    return [c for c in callbacks if c not in left_out]


def written_by_first(
    callbacks: Sequence[keras.callbacks.Callback], saves_together: bool
) -> list[keras.callbacks.Callback]:
    """Return the writers that only rank 0 runs; for `saves_together` see `callbacks_of_rank`."""
    together = (kc.ModelCheckpoint,) if saves_together else ()
    return [c for c in callbacks if isinstance(c, WRITERS) and not isinstance(c, together)]


def saving_together(
    callbacks: Sequence[keras.callbacks.Callback], save: Callable[[Path], None]
) -> None:
    """Let each ModelCheckpoint write the whole model with `save`, a collective.

    Call it after the callbacks have got their model, and on every rank.
    """
    for callback in callbacks:
        if isinstance(callback, kc.ModelCheckpoint):
            overlay(callback, _Elsewhere)
            callback.set_model(_SavedTogether(callback, save))


@contextmanager
def backups_kept(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Let BackupAndRestore delete its backup only after this block, which writes the final model, has succeeded."""
    deleting = [c for c in callbacks if isinstance(c, kc.BackupAndRestore) and c.delete_checkpoint]
    for callback in deleting:
        callback.delete_checkpoint = False
    try:
        yield
    finally:
        for callback in deleting:
            callback.delete_checkpoint = True
    for callback in deleting:
        callback.on_train_end()


class _Elsewhere:
    """Mixin for a ModelCheckpoint that does not create the folder of its file: what saves does, on one rank.

    A rank that failed there alone would miss the collectives that save.
    """

    hvdtrain_path = Path()

    def _get_file_path(self, *when: Any) -> str:
        self.hvdtrain_path = Path(super()._get_file_path(*when))  # type: ignore[misc]
        return self.hvdtrain_path.name


class _SavedTogether:
    """A proxy for a model whose `save` and `save_weights` run on all ranks."""

    def __init__(self, callback: Any, save: Callable[[Path], None]) -> None:
        self._model = callback.model
        self._save = lambda: save(callback.hvdtrain_path)

    def save(self, filepath: Any, overwrite: bool = True) -> None:
        """Write the whole model with its optimizer to the callback's .keras file, or all weights to its .weights.h5."""
        del filepath, overwrite
        self._save()

    save_weights = save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def callback_facts(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
    """Return what the ranks compare of their callbacks: classes, and whether collectives follow from them."""
    methods = (TRAIN_METHODS, TEST_METHODS)
    return {
        "callbacks": [type(callback).__name__ for callback in callbacks],
        "callbacks look at batches": [need_global_batches(callbacks, names) for names in methods],
        "callbacks save within epochs": save_within_epochs(callbacks),
    }


def need_global_batches(
    callbacks: Sequence[keras.callbacks.Callback], methods: Sequence[str]
) -> bool:
    """Whether a callback looks at single steps, so that the logs of each step must be those of all workers.

    This costs three small collectives per step (about 3 ms). The answer is the same on every rank, because it depends
    on the user's whole list.

    Args:
        callbacks: The user's callbacks, the same list on every rank.
        methods: Names of the methods called for each step: TRAIN_METHODS or TEST_METHODS.
    """
    return any(_looks_at_batches(callback, methods) for callback in callbacks)


def save_within_epochs(callbacks: Sequence[keras.callbacks.Callback], sync: Any = None) -> bool:
    """Whether a callback may save after any step; the same on every rank, as in `need_global_batches`.

    Args:
        callbacks: The user's callbacks, the same list on every rank.
        sync: The Trainer's argument.

    Raises:
        UsageError: If one may, and `sync` lets the ranks train alone for some steps.
    """
    kinds = (kc.ModelCheckpoint, kc.OrbaxCheckpoint, kc.BackupAndRestore)
    found = any(c.save_freq != "epoch" for c in callbacks if isinstance(c, kinds))
    if found and sync is not None:
        raise UsageError(
            "sync: no rank holds the averaged model between rounds, so callbacks can only save at the end of an epoch: "
            "leave save_freq out, or use checkpoints=hvdtrain.Checkpoints(every_steps=...)"
        )
    return found


def _looks_at_batches(callback: keras.callbacks.Callback, methods: Sequence[str]) -> bool:
    if isinstance(callback, WarmUp):
        return False
    if not isinstance(callback, WRITERS):
        return any(overrides(callback, method) for method in methods)
    known = {getattr(kind, method) for kind in WRITERS for method in methods}
    if any(getattr(type(callback), method) not in known for method in methods):
        return True  # A method that the user's subclass adds.
    if methods is not TRAIN_METHODS:
        return False
    saves = isinstance(callback, kc.ModelCheckpoint | kc.OrbaxCheckpoint)
    shows = isinstance(callback, kc.TensorBoard)
    return (saves and callback.save_freq != "epoch") or (shows and callback.update_freq != "epoch")
