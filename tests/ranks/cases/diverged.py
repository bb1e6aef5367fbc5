"""Losses and gradients that become nan: Trainer(on_nan=...), against plain Keras without the batch that had it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from references import reference
from small import RANK, SIZE, layers, optimizers, weights

import hvdtrain
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.trainer import periodic_check

BATCH, BAD = 8, 22
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WITHOUT = np.r_[:16, 24:40]
"""The examples of the batches that have no nan in them."""


def spoilt() -> np.ndarray:
    """An example that is nan, in the third batch: in the share of rank 1 of two."""
    x = X.copy()
    x[BAD] = np.nan
    return x


def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])


def normalized(layer: Any = hvdtrain.keras.SyncBatchNormalization) -> keras.Model:
    keras.utils.set_random_seed(3)
    # A bias there has a gradient of zero, of whose rounding Adam makes a step.
    first = layers.Dense(4, use_bias=False)
    return keras.Sequential([layers.Input((3,)), first, layer(), layers.Dense(1)])


class OwnStep(keras.Model):
    """A step of its own, which knows nothing of loss scaling."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(3)
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def adam() -> Any:
    return optimizers.Adam(0.01)


def accumulating() -> Any:
    return optimizers.Adam(0.01, gradient_accumulation_steps=2)


def trainer(
    make: Any = model, optimizer: Any = adam, *, metrics: Any = ("mae",), **options: Any
) -> hvdtrain.Trainer:
    return hvdtrain.Trainer(
        make, optimizer(), "mse", metrics=list(metrics), global_batch_size=BATCH, **options
    )


def new_folder() -> Path:
    return Path(on_first(tempfile.mkdtemp, "folder"))


def case_stopped() -> dict[str, str]:
    def stopped(**options: Any) -> str:
        try:
            trainer(on_nan="stop", **options).fit(spoilt(), Y, shuffle=False, verbose=0)
        except hvdtrain.DivergedError as error:
            return str(error)
        return ""

    return {
        "data parallel": stopped(),
        "several steps": stopped(steps_per_execution=2),
        "ZeRO": stopped(shard_optimizer=True),
        "without guard": stopped(guard=False, probe=False),
    }


def skipped(make: Any = model, optimizer: Any = adam, **options: Any) -> dict[str, Any]:
    """Weights and history, apart from plain Keras's on the data without the batch; and the warnings."""
    x, y = X[WITHOUT], Y[WITHOUT]

    def one_process() -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        plain = normalized(layers.BatchNormalization) if make is normalized else make()
        compiled = () if make is OwnStep else ("mse",)
        plain.compile(optimizer(), *compiled, jit_compile=False)
        history = plain.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return {"weights": [v.numpy() for v in plain.weights], "history": history["loss"]}

    metrics = () if make is OwnStep else ("mae",)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained = trainer(make, optimizer, metrics=metrics, on_nan="skip", probe=False, **options)
        history = trained.fit(spoilt(), Y, epochs=2, shuffle=False, verbose=0).history
    wanted = reference(one_process, (x, y), any_size=True)
    found: dict[str, Any] = {"told": [str(one.message) for one in told]}
    found["weights"] = wanted.apart([v.numpy() for v in trained.model.weights], "weights")
    if make is not OwnStep:  # Whose logs are those of the last step.
        found["history"] = wanted.apart(history["loss"], "history")
    return found


def case_skipped() -> dict[str, Any]:
    return {
        "data parallel": skipped(),
        "several steps": skipped(steps_per_execution=2),
        "statistics": skipped(normalized),
        "accumulation": skipped(optimizer=accumulating),
        "ZeRO": skipped(shard_optimizer=True),
        "own step": skipped(OwnStep),
    }


def case_filler() -> dict[str, Any]:
    """The data of rank 1 ends with a batch that has a nan, and is followed by steps in which that rank is idle."""
    assert SIZE == 2
    own = slice(16, 24) if RANK else slice(0, 16)
    x = spoilt()
    x[20] = np.nan

    def one_process() -> dict[str, Any]:
        plain = model()
        plain.compile(adam(), "mse", jit_compile=False)
        for rows in (np.r_[0:4, 16:20], np.r_[8:12], np.r_[12:16]):
            plain.train_on_batch(X[rows], Y[rows])
        return {"weights": [v.numpy() for v in plain.weights]}

    trained = trainer(on_nan="skip", probe=False)
    trained.fit(x[own], Y[own], sharded=True, shuffle=False, verbose=0)
    found = [v.numpy() for v in trained.model.weights]
    return {"weights": reference(one_process, (x, Y)).apart(found, "weights")}


def case_skipped_until_the_end() -> str:
    x = np.full((600, 3), np.nan, "float32")
    try:
        trainer(on_nan="skip", probe=False).fit(x, x[:, :1], verbose=0)
    except hvdtrain.DivergedError as error:
        return str(error)
    return ""


class Spoil(keras.callbacks.Callback):
    """Makes a weight nan after the second step of the second epoch, and `times - 1` further epochs."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self._epochs = range(1, 1 + times)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._epoch in self._epochs and batch == 1:
            self.model.layers[-1].bias.assign([np.nan])


def case_rewound() -> dict[str, Any]:
    """After the third step, whose loss is nan, the weights are those of the first epoch's end again."""

    def one_process() -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        plain = model()
        plain.compile(adam(), "mse", metrics=["mae"], jit_compile=False)
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        plain.fit(X, Y, **options)
        history = plain.fit(X[24:], Y[24:], **options).history
        return {"weights": weights(plain), "loss": history["loss"], "mae": history["mae"]}

    wanted = reference(one_process, (X, Y), any_size=True)
    found: dict[str, Any] = {}
    for name, options in {"data parallel": {}, "ZeRO": {"shard_optimizer": True}}.items():
        folder = new_folder()
        saving = {"run_dir": folder, "checkpoints": hvdtrain.Checkpoints()}
        trained = trainer(on_nan="rewind", **saving, **options)
        with mock.patch.object(periodic_check, "CHECK_SECONDS", 0.0):  # After every step.
            history = trained.fit(
                X, Y, epochs=2, shuffle=False, verbose=0, callbacks=Spoil()
            ).history
        found[name] = {
            "weights": wanted.apart(weights(trained.model), "weights"),
            "loss": wanted.apart(history["loss"][1:], "loss"),
            "mae": wanted.apart(history["mae"][1:], "mae"),
            "file": (folder / "diverged.jsonl").read_text(),
        }
    return found


def case_rewound_in_vain() -> list[str]:
    """Without a checkpoint; and when the same happens again after each return to it."""

    def ended(epochs: int, *callbacks: Any) -> str:
        # No epoch of which ends well: its end is never saved.
        saving = {"run_dir": new_folder(), "checkpoints": hvdtrain.Checkpoints()}
        x = X if callbacks else spoilt()
        try:
            with mock.patch.object(periodic_check, "CHECK_SECONDS", 0.0):
                trainer(on_nan="rewind", guard=False, **saving).fit(
                    x, Y, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
                )
        except hvdtrain.DivergedError as error:
            return str(error)
        return ""

    class Always(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.spoils = epoch > 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.spoils:
                self.model.layers[-1].bias.assign([np.nan])

    return [ended(1), ended(3, Always())]
