"""Which Keras callback runs on which rank, and which of them need every step's values of all workers."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import callbacks as kc

from hvdtrain.keras import compat
from hvdtrain.trainer.learning_rate import WarmUp

WRITERS = (kc.ModelCheckpoint, kc.TensorBoard, kc.CSVLogger, kc.BackupAndRestore, kc.RemoteMonitor)
"""They write files or talk to a server, and decide nothing: rank 0 runs them alone."""

_BATCH_METHODS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def on_this_rank(
    callbacks: Sequence[keras.callbacks.Callback], is_first: bool
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank runs: all on rank 0, those that are no writers elsewhere."""
    return [c for c in callbacks if is_first or not isinstance(c, WRITERS)]


def need_global_batches(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether a callback looks at single steps, so that each step's logs must be those of all workers.

    Costs two small collectives a step (about 2 ms). The same answer on every rank: it is asked of the
    user's whole list.
    """
    return any(_looks_at_batches(callback) for callback in callbacks)


def _looks_at_batches(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, kc.ModelCheckpoint):
        return callback.save_freq != "epoch"
    if isinstance(callback, (*WRITERS, WarmUp)):
        return False
    return any(compat.overrides(callback, method) for method in _BATCH_METHODS)
