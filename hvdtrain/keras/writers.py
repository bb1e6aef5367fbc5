"""Callbacks that write files: on the first rank only, and with the error of one rank raised on all of them.

Ranks that write the same files at the same time would corrupt them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import callbacks as kc

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.consistency import any_rank, raise_alike
from hvdtrain.collectives.first_rank import first_rank_alone
from hvdtrain.collectives.step_context import without_others
from hvdtrain.errors import warn_user
from hvdtrain.keras_internals.models import overrides

WRITERS = (
    kc.ModelCheckpoint,
    kc.OrbaxCheckpoint,
    kc.TensorBoard,
    kc.CSVLogger,
    kc.BackupAndRestore,
    kc.RemoteMonitor,
)
"""Callbacks that write files or send to a server, and do not control training: only the first rank runs them."""
LOGGERS = (kc.TensorBoard, kc.CSVLogger, kc.RemoteMonitor)
"""Writers whose failure does not harm a training that has begun."""


def on_this_rank(
    callbacks: Sequence[keras.callbacks.Callback], is_first: bool
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs: all on the first rank, on the others those that do not write."""
    return [c for c in callbacks if is_first or not isinstance(c, WRITERS)]


def failing_together(
    callbacks: Sequence[keras.callbacks.Callback],
    own: Sequence[keras.callbacks.Callback],
    ranks: Communicator,
    alone: Sequence[keras.callbacks.Callback] = (),
    waits: bool = True,
) -> list[keras.callbacks.Callback]:
    """Return callbacks for a CallbackList that raise the error of one rank's writer on all ranks.

    They raise it when training begins or ends, at the end of an epoch, and at the end of an evaluation that is not
    part of a training (within one, some ranks may have no validation data). Each check costs a small allreduce; a
    single rank raises at once. If a log can no longer be written, its callback warns and is not called again, and the
    training continues.

    Args:
        callbacks: The user's callbacks.
        own: Those that this rank runs, from `on_this_rank`.
        ranks: Ranks that train together.
        alone: Writers that only the first rank runs.
        waits: Whether the others wait for these, which are at the same places on every rank.
    """
    kinds = WRITERS if ranks.size() > 1 else LOGGERS
    running, first = ({id(c) for c in some} for some in (own, alone))
    placed: list[keras.callbacks.Callback] = []
    for callback in callbacks:
        if isinstance(callback, kinds) and id(callback) in running | first:
            only = ranks if id(callback) in first else None
            placed.append(Writer(callback, id(callback) in running, only, waits))
        elif id(callback) in running:
            placed.append(callback)
    return [*placed, RaiseAlike([c for c in placed if isinstance(c, Writer)], ranks)]


class Writer(keras.callbacks.Callback):
    """Wraps a callback that writes: keeps its first error, and does not call it again after that.

    A full disk ends the training if the model cannot be saved, but not if only lines of a log are lost.

    Args:
        callback: Callback of one of the WRITERS.
        runs: Whether this rank runs it.
        ranks: Ranks of which only the first runs it, so that it must not call their collectives. None: all run it.
        waits: Whether the others of `ranks` wait for it in the methods LONG, and while it saves within an epoch, so
            that the stall check does not apply there.
    """

    LONG = ("on_train_begin", "on_epoch_end", "on_train_end")

    def __init__(
        self,
        callback: keras.callbacks.Callback,
        runs: bool = True,
        ranks: Communicator | None = None,
        waits: bool = True,
    ) -> None:
        super().__init__()
        self.hvdtrain_wrapped = callback
        self.name = type(callback).__name__
        self.runs = runs
        self.ranks = ranks
        self.waits = waits
        self.error: Exception | None = None
        self.is_fatal = False
        self._logs = isinstance(callback, LOGGERS)
        self._begun = not overrides(callback, "on_train_begin")
        hooks = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]
        for name in ["set_model", "set_params", *(n for n in hooks if overrides(callback, n))]:
            setattr(self, name, partial(self._run, name))

    def _run(self, hook: str, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as blocks:
            ranks = self.ranks
            if ranks is None:
                pass
            elif self.waits and (hook in self.LONG or self._saves_now(hook, args, ranks, blocks)):
                blocks.enter_context(first_rank_alone(ranks, f"callback {self.name}"))
            elif self.runs:
                blocks.enter_context(without_others(ranks.ranks[:1]))
            self._call(hook, *args, **kwargs)

    def _saves_now(
        self, hook: str, args: Any, ranks: Communicator, blocks: contextlib.ExitStack
    ) -> bool:
        """Whether the callback saves after this batch. A collective if it may save within an epoch.

        Only the first rank knows: a resumed training has restored its count of batches there. Keras's method counts
        each time it is asked, so the callback gets the answer in `blocks`.
        """
        callback = self.hvdtrain_wrapped
        if hook != "on_train_batch_end" or getattr(callback, "save_freq", "epoch") == "epoch":
            return False
        saves = self.runs and callback._should_save_on_batch(args[0])
        if self.runs:
            vars(callback)["_should_save_on_batch"] = lambda batch: saves
            blocks.callback(vars(callback).pop, "_should_save_on_batch")
        return any_rank(saves, "saves_now", ranks)

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        if self.error is not None or not self.runs:
            return
        try:
            getattr(self.hvdtrain_wrapped, hook)(*args, **kwargs)
            self._begun = self._begun or hook == "on_train_begin"
        except Exception as error:
            self.error = error
            unwritten = isinstance(error, OSError | tf.errors.OpError)
            self.is_fatal = not (self._logs and self._begun and unwritten)
            then = (
                "the run will stop at the end of the epoch"
                if self.is_fatal
                else "it will not be called again"
            )
            warn_user(f"callback {self.name} failed; {then}: {error!r}")


class RaiseAlike(keras.callbacks.Callback):
    """Callback after the writers that raises the error of one rank's writer on all ranks."""

    def __init__(self, writers: Sequence[Writer], ranks: Communicator) -> None:
        super().__init__()
        self._writers = writers
        self._ranks = ranks
        self._in_training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._in_training = True
        self._raise()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._raise()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._raise()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._in_training:
            self._raise()

    def _raise(self) -> None:
        failed = next((c for c in self._writers if c.is_fatal), None)
        if failed is None:
            raise_alike(None, "", self._ranks)
        else:
            raise_alike(failed.error, f"callback {failed.name}", self._ranks)
