"""`model.fit` with a distributed optimizer or tape: writers on the first rank only, and checks of the replicas.

The first rank is that of the process set of the optimizer or tape.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras import callbacks as kc

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.collectives.gradient_accumulation import common_accumulators, share_accumulators
from hvdtrain.collectives.replicas import (
    broadcast_variables,
    check_replicas,
    require_same_model,
)
from hvdtrain.collectives.tensor_names import is_named_by_places
from hvdtrain.keras.callbacks import BroadcastGlobalVariablesCallback
from hvdtrain.keras.writers import (
    LOGGERS,
    WRITERS,
    RaiseAlike,
    Writer,
    failing_together,
    on_this_rank,
)
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.keras_internals.keras_files import note_arguments
from hvdtrain.keras_internals.models import (
    distributed_optimizers,
    refresh_constants,
    trains_by_keras,
)
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    taped_variables,
    trained_variables,
)
from hvdtrain.rank_variables import is_elastic


def prepare_fit() -> None:
    """Let `model.fit` run writers on the first rank only, and let them replace files atomically. Idempotent."""
    correct(keras.Model, "fit", _fit)
    prepare_saving()
    note_arguments()


def _fit(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Replacement of keras.Model.fit.

    The callbacks are left unchanged if the user passes a CallbackList, and with a sharded optimizer, which all ranks
    must save together.
    """
    call = inspect.signature(original).bind(self, *args, **kwargs)
    callbacks = call.arguments.get("callbacks")
    distributed = distributed_optimizers(self)
    if isinstance(callbacks, kc.CallbackList) or any(map(is_sharded, distributed)):
        return original(*call.args, **call.kwargs)
    given = keras.tree.flatten(callbacks or [])
    if distributed:
        ranks = inner_of(distributed[0]).process_set
        if ranks.includes_this() and ranks.size() > 1:
            # The script may have broadcast the variables of adapted layers.
            refresh_constants(self)
            checks = _agree(given, self, ranks, **_arguments(distributed))
            own = on_this_rank(given, is_first=ranks.rank() == 0)
            restores = any(isinstance(c, kc.BackupAndRestore) for c in own)
            restored = _RestoreTogether(ranks, restores)
            alone = [c for c in given if isinstance(c, WRITERS)]
            writing = failing_together(given, own, ranks, alone, _are_alike(given, ranks))
            call.arguments["callbacks"] = [_ShareAccumulators(), *writing, restored, *checks]
    elif not trains_by_keras(self) and hvd.is_initialized() and hvd.size() > 1:
        call.arguments["callbacks"] = _until_the_first_step(given)
    return original(*call.args, **call.kwargs)


def _are_alike(callbacks: Sequence[keras.callbacks.Callback], ranks: Communicator) -> bool:
    """Whether the script gives the same callbacks on every rank. A collective.

    Scripts for Horovod often give writers on the first rank only. There, the others cannot know where to wait.
    """
    own = [[type(c).__name__, str(getattr(c, "save_freq", ""))] for c in callbacks]
    everyone = ranks.exchange(own, "writers")
    return all(one == everyone[0] for one in everyone)


def _arguments(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of DistributedOptimizer that must be the same on all ranks, each for all optimizers."""
    inner = [inner_of(one) for one in optimizers]
    reductions = [one.hvdtrain_reducer.reduction.arguments for one in inner]
    facts = {name: [one[name] for one in reductions] for name in reductions[0]}
    return facts | {"gradient_accumulation_steps": [o.gradient_accumulation_steps for o in inner]}


def _agree(
    callbacks: Sequence[keras.callbacks.Callback],
    model: keras.Model,
    ranks: Communicator,
    **facts: Any,
) -> list[keras.callbacks.Callback]:
    """Require that the ranks begin the same fit, and return the callbacks that compare them later. A collective.

    Args:
        callbacks: Callbacks that this rank's script has given to fit.
        model: Model to train.
        ranks: Ranks that train together.
        facts: What else must be the same on all ranks, by name.

    Raises:
        ReplicaError: On all ranks: they differ.
    """
    together = [type(c).__name__ for c in callbacks if getattr(c, "hvdtrain_on_all_ranks", False)]
    facts["what must be among the callbacks of every rank"] = sorted(together)
    require_same_model(facts, model, "fit", "callbacks", ranks)
    stops = any(isinstance(c, kc.TerminateOnNaN) for c in callbacks)
    # BroadcastGlobalVariablesCallback checks the replicas, unless its guard is off.
    guarded = any(isinstance(c, BroadcastGlobalVariablesCallback) for c in callbacks)
    return [
        *([_StopTogether(ranks)] if any_rank(stops, "stops", ranks) else []),
        *([] if guarded else [_CompareReplicas(ranks)]),
    ]


class _StopTogether(keras.callbacks.Callback):
    """Ends the training on all ranks after a batch in which TerminateOnNaN ends it on one."""

    def __init__(self, ranks: Communicator) -> None:
        super().__init__()
        self._ranks = ranks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.stop_training = any_rank(self.model.stop_training, "stop", self._ranks)


class _ShareAccumulators(keras.callbacks.Callback):
    """First callback: lets the files of an epoch, or of the model afterwards, hold the accumulated gradients of all."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        share_accumulators(distributed_optimizers(self.model))


class _RestoreTogether(keras.callbacks.Callback):
    """Broadcasts what BackupAndRestore has restored on the first rank."""

    def __init__(self, ranks: Communicator, restores: bool) -> None:
        super().__init__()
        self._ranks = ranks
        self._restores = restores

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # BackupAndRestore sets _initial_epoch, which overrides fit's argument.
        mine = tf.constant([self.model._initial_epoch or 0, int(self._restores)])
        root = self._ranks.ranks[0]
        epoch, restored = self._ranks.broadcast(mine, root, "hvdtrain_restored").numpy()
        if restored:
            self.model._initial_epoch = int(epoch) or None
            # As reading the file does, also if the model's train_step uses other optimizers.
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            common = replicated_variables(self.model, local=local_variables(self.model))
            waiting = common_accumulators(distributed_optimizers(self.model))
            broadcast_variables([*common, *waiting], root, process_set=self._ranks)
            refresh_constants(self.model)


class _CompareReplicas(keras.callbacks.Callback):
    """Compares the replicas after every epoch.

    Without a broadcast of the initial weights, each rank would train a model of its own with averaged gradients.
    No earlier, because Horovod's own examples broadcast after the first batch. In an elastic job, Horovod's examples
    also train a step before the state is sent to all, when they begin and whenever workers join.
    """

    def __init__(self, ranks: Communicator) -> None:
        super().__init__()
        self._ranks = ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if is_elastic(os.environ) and not is_named_by_places():
            return
        variables, when = trained_variables(self.model), f"after epoch {epoch + 1}"
        check_replicas(variables=variables, when=when, process_set=self._ranks)


def _until_the_first_step(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.Callback]:
    """Return callbacks for a model with a train_step of its own, which may use a DistributedGradientTape.

    Whether it does is known after the first step. Until then the loggers wait, which would create their files.
    """
    own = [_Waiting(c) if isinstance(c, WRITERS) else c for c in callbacks]
    last = _Last()
    waiting = [c for c in own if isinstance(c, _Waiting)]
    return [_FirstStep(callbacks, waiting, last), *own, last]


class _Waiting(Writer):
    """A writer in the first step of a fit: a logger misses the calls until it is known what to do with them.

    Attributes:
        missed: Calls that a logger has missed; None if it waits no longer, or is no logger.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__(callback)
        # A TensorBoard that writes each batch must be there when the step is traced. It has a file of its own.
        at_once = getattr(callback, "update_freq", "epoch") != "epoch"
        waits = isinstance(callback, LOGGERS) and not at_once
        self.missed: list[Callable[[], None]] | None = [] if waits else None

    def go_on(self, ranks: Communicator | None = None, waits: bool = False) -> None:
        """End the wait: only the first of `ranks` runs it from now on, and `waits` is that of `Writer`; None: all."""
        missed, self.missed = self.missed or [], None
        self.ranks, self.waits = ranks, waits
        self.runs = ranks is None or ranks.rank() == 0
        for call in missed:
            call()

    def _run(self, hook: str, *args: Any, **kwargs: Any) -> None:
        if self.missed is not None:
            self.missed.append(partial(self._run, hook, *args, **kwargs))
        elif self.ranks is not None:
            super()._run(hook, *args, **kwargs)
        else:
            getattr(self.hvdtrain_wrapped, hook)(*args, **kwargs)


class _FirstStep(keras.callbacks.Callback):
    """First callback: finds out after the first step whether a tape has reduced its gradients.

    Args:
        given: Callbacks that this rank's script has given to fit.
        waiting: The writers among them.
        last: Runs the callbacks that compare the ranks.
    """

    def __init__(
        self,
        given: Sequence[keras.callbacks.Callback],
        waiting: Sequence[_Waiting],
        last: _Last,
    ) -> None:
        super().__init__()
        self._given = given
        self._waiting = waiting
        self._last = last
        self._epoch = 0
        self._decided = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._decide()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._decide()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._decide()  # There was no step.

    def _decide(self) -> None:
        if self._decided:
            return
        self._decided = True
        taped = taped_variables(self.model)
        ranks = taped[0][1].reduction.process_set if taped else None
        if ranks is None or not ranks.includes_this() or ranks.size() == 1:
            for writer in self._waiting:
                writer.go_on()
            return
        checks = _agree(self._given, self.model, ranks, **{"the first epoch": self._epoch + 1})
        waits = _are_alike(self._given, ranks)
        for writer in self._waiting:
            writer.go_on(ranks, waits)
        self._last.begin([RaiseAlike(self._waiting, ranks), *checks])


class _Last(keras.callbacks.Callback):
    """Last callback: runs the callbacks that `begin` adds when the training has already begun."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[keras.callbacks.Callback] = []

    def begin(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Add `callbacks`, and tell them that the training begins."""
        for callback in callbacks:
            callback.set_model(self.model)
            callback.set_params(self.params)
            callback.on_train_begin()
        self._callbacks = callbacks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_train_end(logs)
