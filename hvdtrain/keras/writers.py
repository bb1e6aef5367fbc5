"""Callbacks that write: under `model.fit` with a distributed optimizer the first rank runs them alone.

Ranks that write the same files at the same time break them. The first rank is that of the optimizer's process set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import callbacks as kc

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.replicas import broadcast_variables
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.optimizer_state import is_in_parts
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed
from hvdtrain.keras_internals.variables import local_variables, replicated_variables

WRITERS = (kc.ModelCheckpoint, kc.TensorBoard, kc.CSVLogger, kc.BackupAndRestore, kc.RemoteMonitor)
"""They write files or talk to a server, and decide nothing: rank 0 runs them alone."""


def on_this_rank(
    callbacks: Sequence[keras.callbacks.Callback], is_first: bool
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs: all on the first rank, those that are no writers elsewhere."""
    return [c for c in callbacks if is_first or not isinstance(c, WRITERS)]


def prepare_fit() -> None:
    """Let `model.fit` leave writers to the first rank; calling again changes nothing."""
    correct(keras.Model, "fit", _fit)


def _fit(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """keras.Model.fit. A CallbackList of the user's own stays as it is; a divided optimizer is saved by all ranks."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    callbacks = call.arguments.get("callbacks")
    optimizer = getattr(self, "optimizer", None)
    plain = not is_distributed(optimizer) or is_in_parts(optimizer)
    if plain or isinstance(callbacks, kc.CallbackList):
        return original(*call.args, **call.kwargs)
    ranks = inner_of(optimizer).process_set
    if ranks.includes_this() and ranks.size() > 1:
        own = on_this_rank(keras.tree.flatten(callbacks or []), is_first=ranks.rank() == 0)
        restores = any(isinstance(c, kc.BackupAndRestore) for c in own)
        call.arguments["callbacks"] = [*own, _GoOnTogether(ranks, restores)]
    return original(*call.args, **call.kwargs)


class _GoOnTogether(keras.callbacks.Callback):
    """The last one at the beginning: what the first rank has restored (BackupAndRestore) holds for all."""

    def __init__(self, ranks: Communicator, restores: bool) -> None:
        super().__init__()
        self._ranks = ranks
        self._restores = restores

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The epoch at which fit begins, if it is not that of its argument initial_epoch.
        mine = tf.constant([self.model._initial_epoch or 0, int(self._restores)])
        root = self._ranks.ranks[0]
        epoch, restored = self._ranks.broadcast(mine, root, "hvdtrain_restored").numpy()
        if restored:
            self.model._initial_epoch = int(epoch) or None
            common = replicated_variables(self.model, local=local_variables(self.model))
            broadcast_variables(common, root, process_set=self._ranks)
