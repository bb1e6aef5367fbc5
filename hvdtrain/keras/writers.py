"""`model.fit` with a distributed optimizer: callbacks that write files on the first rank only, and replica checks.

Ranks that write the same files at the same time would corrupt them. The first rank is that of the optimizer's process
set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import callbacks as kc

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.consistency import any_rank, raise_alike, require_equal
from hvdtrain.collectives.replicas import broadcast_variables, check_replicas
from hvdtrain.errors import warn_user
from hvdtrain.keras.callbacks import BroadcastGlobalVariablesCallback
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.keras_internals.models import optimizers_of, overrides, refresh_constants
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    trained_variables,
)

WRITERS = (kc.ModelCheckpoint, kc.TensorBoard, kc.CSVLogger, kc.BackupAndRestore, kc.RemoteMonitor)
"""Callbacks that write files or send to a server, and do not control training: only the first rank runs them."""
LOGGERS = (kc.TensorBoard, kc.CSVLogger, kc.RemoteMonitor)
"""Writers whose failure does not harm a training that has begun."""


def on_this_rank(
    callbacks: Sequence[keras.callbacks.Callback], is_first: bool
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs: all on the first rank, on the others those that do not write."""
    return [c for c in callbacks if is_first or not isinstance(c, WRITERS)]


def failing_together(
    callbacks: Sequence[keras.callbacks.Callback], ranks: Communicator
) -> list[keras.callbacks.Callback]:
    """Return callbacks for a CallbackList that raise the error of one rank's writer on all ranks.

    They raise it when training begins or ends, at the end of an epoch, and at the end of an evaluation that is not
    part of a training (within one, some ranks may have no validation data). Each check costs a small allreduce; a
    single rank raises at once. If a log can no longer be written, its callback warns and is not called again, and the
    training continues.

    Args:
        callbacks: Callbacks of this rank, from `on_this_rank`.
        ranks: Ranks that train together.
    """
    kinds = WRITERS if ranks.size() > 1 else LOGGERS
    own = [_Writer(c) if isinstance(c, kinds) else c for c in callbacks]
    return [*own, _RaiseAlike([c for c in own if isinstance(c, _Writer)], ranks)]


def prepare_fit() -> None:
    """Let `model.fit` run writers on the first rank only, and let them replace files atomically. Idempotent."""
    correct(keras.Model, "fit", _fit)
    prepare_saving()


def _fit(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Replacement of keras.Model.fit.

    The callbacks are left unchanged if the user passes a CallbackList, and with a sharded optimizer, which all ranks
    must save together.
    """
    call = inspect.signature(original).bind(self, *args, **kwargs)
    callbacks = call.arguments.get("callbacks")
    distributed = [optimizer for optimizer in optimizers_of(self) if is_distributed(optimizer)]
    plain = not distributed or any(map(is_sharded, distributed))
    if plain or isinstance(callbacks, kc.CallbackList):
        return original(*call.args, **call.kwargs)
    ranks = inner_of(distributed[0]).process_set
    if ranks.includes_this() and ranks.size() > 1:
        given = keras.tree.flatten(callbacks or [])
        together = [type(c).__name__ for c in given if getattr(c, "hvdtrain_on_all_ranks", False)]
        facts = {"what must be among the callbacks of every rank": sorted(together)}
        require_equal(facts, "fit", "callbacks", ranks)
        stops = any(isinstance(c, kc.TerminateOnNaN) for c in given)
        own = on_this_rank(given, is_first=ranks.rank() == 0)
        restores = any(isinstance(c, kc.BackupAndRestore) for c in own)
        guarded = any(isinstance(c, BroadcastGlobalVariablesCallback) for c in own)
        call.arguments["callbacks"] = [
            *failing_together(own, ranks),
            *([_StopTogether(ranks)] if any_rank(stops, "stops", ranks) else []),
            _GoOnTogether(ranks, restores, guarded),
        ]
    return original(*call.args, **call.kwargs)


class _Writer(keras.callbacks.Callback):
    """Wraps a callback that writes: keeps its first error, and does not call it again after that.

    A full disk ends the training if the model cannot be saved, but not if only lines of a log are lost.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.hvdtrain_wrapped = callback
        self.name = type(callback).__name__
        self.error: Exception | None = None
        self.is_fatal = False
        self._logs = isinstance(callback, LOGGERS)
        self._begun = not overrides(callback, "on_train_begin")
        hooks = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]
        for name in ["set_model", "set_params", *(n for n in hooks if overrides(callback, n))]:
            setattr(self, name, partial(self._run, getattr(callback, name)))

    def _run(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            return
        try:
            method(*args, **kwargs)
            self._begun = self._begun or method.__name__ == "on_train_begin"
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


class _RaiseAlike(keras.callbacks.Callback):
    """Callback after the writers that raises the error of one rank's writer on all ranks."""

    def __init__(self, writers: Sequence[_Writer], ranks: Communicator) -> None:
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


class _StopTogether(keras.callbacks.Callback):
    """Ends the training on all ranks after a batch in which TerminateOnNaN ends it on one."""

    def __init__(self, ranks: Communicator) -> None:
        super().__init__()
        self._ranks = ranks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.stop_training = any_rank(self.model.stop_training, "stop", self._ranks)


class _GoOnTogether(keras.callbacks.Callback):
    """Last callback: broadcasts what BackupAndRestore has restored on the first rank, and checks the replicas.

    Without a broadcast of the initial weights, each rank would train a model of its own with averaged gradients.
    """

    def __init__(self, ranks: Communicator, restores: bool, guarded: bool) -> None:
        super().__init__()
        self._ranks = ranks
        self._restores = restores
        # BroadcastGlobalVariablesCallback checks the replicas, unless its guard is off.
        self._guarded = guarded

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # BackupAndRestore sets _initial_epoch, which overrides fit's argument.
        mine = tf.constant([self.model._initial_epoch or 0, int(self._restores)])
        root = self._ranks.ranks[0]
        epoch, restored = self._ranks.broadcast(mine, root, "hvdtrain_restored").numpy()
        if restored:
            self.model._initial_epoch = int(epoch) or None
            # As reading the file does, also if the model's train_step uses other optimizers.
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            common = replicated_variables(self.model, local=local_variables(self.model))
            broadcast_variables(common, root, process_set=self._ranks)
            refresh_constants(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # No earlier, because Horovod's own examples broadcast after the first batch.
        if not self._guarded:
            variables, when = trained_variables(self.model), f"after epoch {epoch + 1}"
            check_replicas(variables=variables, when=when, process_set=self._ranks)
