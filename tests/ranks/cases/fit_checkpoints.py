"""model.fit with CheckpointCallback, ended and started again: see test_fit_checkpoints.py."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import CheckpointCallback, ReplicaError
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.parallel import ShardedOptimizer

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
EPOCHS = 6


class Ended(Exception):
    """In place of the signal that ends a process."""


class EndAt(keras.callbacks.Callback):
    """Ends the training in the middle of an epoch, counted from 0."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.at = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.at == self.epoch and batch == 1:
            raise Ended

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch


def _folder() -> Path:
    return Path(ALL_RANKS.exchange(tempfile.mkdtemp(), "folder")[0])


def _fit(folder: Path, *own: Any, wrap: Callable[..., Any]) -> dict[str, Any]:
    """Train as a new process would, with all that a callback may remember; return what must be alike."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), *layers])
    adam = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
    model.compile(wrap(adam), "mse", metrics=["mae"])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1.0)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=1.0)
    log = folder / f"log-{hvd.rank()}.csv"
    callbacks = [
        *own,  # First, and acts last.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        plateau,
        stopping,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.9),
        keras.callbacks.CSVLogger(log),
    ]
    if (
        wrap is hvd.DistributedOptimizer
    ):  # With one in parts all ranks would save the model together.
        best = keras.callbacks.ModelCheckpoint(folder / "best.keras", "loss", save_best_only=True)
        callbacks.append(best)
    mine = slice(hvd.rank(), None, hvd.size())
    history = model.fit(
        X[mine],
        Y[mine],
        batch_size=4,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=(X[mine], Y[mine]),
        callbacks=callbacks,
        verbose=0,
    )
    return {
        "weights": [
            variable.numpy() for variable in [*model.variables, *model.optimizer.variables]
        ],
        "history": history.history,
        "epochs": history.epoch,
        "waited": [plateau.wait, stopping.wait],
        "log": log.read_text() if log.is_file() else "",
    }


def case_ended_and_resumed() -> dict[str, Any]:
    return _ended_and_resumed(partial(_fit, wrap=hvd.DistributedOptimizer))


def case_sharded_optimizer() -> dict[str, Any]:
    return _ended_and_resumed(partial(_fit, wrap=ShardedOptimizer))


def _ended_and_resumed(fit: Callable[..., Any]) -> dict[str, Any]:
    """Ended in epochs 3 and 4 of 6; stopped by EarlyStopping after the fourth. No callback here has unknown state."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        undisturbed = fit(_folder())
        folder = _folder()
        for epoch in (2, 3):
            try:
                fit(folder, CheckpointCallback(folder / "run"), EndAt(epoch))
            except Ended:
                pass
            else:
                raise AssertionError("it was to be ended")
        resumed = fit(folder, CheckpointCallback(folder / "run"))
    return {"undisturbed": undisturbed, "resumed": resumed}


def case_on_one_rank_only() -> list[str]:
    """What fit says of callbacks that every rank must have, and one does not."""
    said = []
    folder = _folder()
    for make in (partial(CheckpointCallback, folder), hvd.callbacks.MetricAverageCallback):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
        try:
            model.fit(X, Y, verbose=0, callbacks=[make()] if hvd.rank() == 0 else [])
        except ReplicaError as error:
            said.append(str(error))
    return said
