"""Trainings, honest ones and others, whose first steps are recorded as `hvdtrain verify` does."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.keras import SyncBatchNormalization
from hvdtrain.verify.loop_recorder import recorded_loops
from hvdtrain.verify.step_recorder import EnoughSteps, Recorder, recorded_fits
from hvdtrain.verify.written_files import recorded_files

STEPS = 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = X.sum(1, keepdims=True)
IMAGES = X[:, :, None, None] * np.ones((1, 1, 6, 1), "float32")


def dense(*between: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(8), *between, layers.Dense(1)])


def train(
    build: Any = dense, x: Any = X, y: Any = Y, *, fit: Any = (), batch: int = 8, **settings: Any
) -> None:
    settings = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | settings
    trainer = hvdtrain.Trainer(build, metrics=["mae"], global_batch_size=batch, **settings)
    trainer.fit(x, y, epochs=2, **dict(fit))


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            *(keras.Input((6, 6, 1)), layers.Conv2D(4, 3, activation="relu")),
            *(SyncBatchNormalization(), layers.Flatten(), layers.Dense(1)),
        ]
    )


def without_warnings(run: Callable[[], None]) -> None:
    """Run as in a script that calls warnings.simplefilter("ignore")."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()


class RateByWorkers(keras.callbacks.Callback):
    """A callback of a script's own."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.01 * ALL_RANKS.size()


def unseeded() -> tuple[Any, Any]:
    order = np.random.default_rng().permutation(len(X))
    # Equal on all ranks, as the Trainer demands, and other ones in each run.
    order = np.asarray(ALL_RANKS.broadcast(order, 0, "order"))
    return X[order], Y[order]


def by_workers() -> tuple[Any, Any]:
    order = np.random.default_rng(ALL_RANKS.size()).permutation(len(X))
    return X[order], Y[order]


class RateOfOneWorker(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if ALL_RANKS.rank() == ALL_RANKS.size() - 1:
            self.model.optimizer.learning_rate = 0.1 / ALL_RANKS.size()


def order_of_the_workers() -> Any:
    """The examples of each batch in another order on several workers."""
    return np.arange(24).reshape(3, 8)[:, :: 1 if ALL_RANKS.size() == 1 else -1].ravel()


def from_a_file_of_all_workers() -> Any:
    """Data that every worker writes to the same file, the last one last."""
    path = Path(os.environ["FOLDER"], f"data-{ALL_RANKS.size()}.npy")
    for rank in range(ALL_RANKS.size()):
        if rank == ALL_RANKS.rank():
            np.save(path, X + rank)
        ALL_RANKS.exchange(rank, "written")
    return np.load(path)


def loss_over_the_workers(true: Any, predicted: Any) -> Any:
    return tf.reduce_mean((true - predicted) ** 2, axis=-1) / ALL_RANKS.size()


class Noise(layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.normal(tf.shape(x)) if training else x


def fit_by_keras(
    rate: float = 0.01,
    build: Any = dense,
    optimizer: Any = None,
    callbacks: Any = (),
    guard: bool = True,
    **compiled: Any,
) -> None:
    """Each rank has every so many-th example of a batch."""
    ranks = ALL_RANKS.size()
    # The callback below gives all ranks the weights of rank 0.
    keras.utils.set_random_seed(ALL_RANKS.rank())
    model = build()
    inner = optimizer or keras.optimizers.Adam(rate, global_clipnorm=1.0)
    model.compile(hvd.DistributedOptimizer(inner), "mse", **compiled)
    x, y = (array[ALL_RANKS.rank() :: ranks] for array in (X, Y))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0, guard=guard), *callbacks]
    model.fit(x, y, batch_size=8 // ranks, shuffle=False, callbacks=callbacks, verbose=0)


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def own_loop(
    compiled: bool,
    reduced: bool = True,
    build: Any = dense,
    clip: Any = None,
    first: int | None = None,
    **tape_options: Any,
) -> None:
    """Train with a tape; `first`: how many of a batch's 8 examples the first of several workers takes."""
    model, ranks = build(), ALL_RANKS.size()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(x, training=True) - y) ** 2))
        weights = model.trainable_variables
        if clip is not None:
            gradients = [hvd.allreduce(one) for one in clip(tape.gradient(loss, weights))]
        else:
            watched = hvd.DistributedGradientTape(tape, **tape_options) if reduced else tape
            gradients = watched.gradient(loss, weights)
        optimizer.apply(gradients, weights)
        return loss

    step = tf.function(step) if compiled else step
    for begin in range(0, 24, 8):
        batch = slice(begin + ALL_RANKS.rank(), begin + 8, ranks)
        if first is not None and ranks > 1:
            batch = slice(
                begin + ALL_RANKS.rank() * first, begin + (8, first)[not ALL_RANKS.rank()]
            )
        step(X[batch], Y[batch])


def seeded_by_the_rank() -> keras.Model:
    keras.utils.set_random_seed(ALL_RANKS.rank())
    return dense()


def own_decay() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.01, 100 // ALL_RANKS.size(), 0.9)


SAME: dict[str, Callable[[], None]] = {
    "dense": train,
    "tail": lambda: train(x=X[:21], y=Y[:21]),
    "convolutional": lambda: train(convolutional, IMAGES),
    "zero": lambda: train(shard_optimizer=True),
    "tensor": lambda: train(
        lambda: dense(layers.Dense(8, name="up"), layers.Dense(4, name="down")),
        layout=hvdtrain.Layout(
            hvdtrain.Mesh(tensor=ALL_RANKS.size()), split={"up": "column", "down": "row"}
        ),
    ),
    "steps per execution": lambda: train(steps_per_execution=2),
    "dataset": lambda: train(x=_dataset(), y=None),
    "model.fit": fit_by_keras,
    "own loop": lambda: own_loop(compiled=True),
    "own eager loop": lambda: own_loop(compiled=False),
}
DIFFERENT: dict[str, Callable[[], None]] = {
    "BatchNormalization": lambda: without_warnings(
        lambda: train(lambda: dense(layers.BatchNormalization()))
    ),
    "scaled rate": lambda: train(learning_rate_scaling="linear"),
    "rate of a callback": lambda: train(fit={"callbacks": [RateByWorkers()]}),
    "batch of the workers": lambda: train(batch=4 * ALL_RANKS.size()),
    "data of the workers": lambda: train(x=by_workers()[0], y=by_workers()[1]),
    "rounds": lambda: train(sync=hvdtrain.LocalSGD(every=2)),
    "model.fit with a scaled rate": lambda: fit_by_keras(0.01 * ALL_RANKS.size()),
    "own loop without a reduction": lambda: own_loop(compiled=True, reduced=False),
    "own loop without a broadcast": lambda: own_loop(compiled=True, build=seeded_by_the_rank),
    "own loop that adds up": lambda: own_loop(compiled=True, op=hvd.Sum),
    "own loop that clips on each worker": lambda: own_loop(compiled=True, clip=clipped),
    "own loop with unequal shares": lambda: own_loop(compiled=False, first=6),
    "own loop with dropout": lambda: own_loop(
        compiled=True, build=lambda: dense(layers.Dropout(0.5))
    ),
    "model.fit with the rate of one worker": lambda: fit_by_keras(
        callbacks=[RateOfOneWorker()], guard=False
    ),
    "model.fit with BatchNormalization": lambda: fit_by_keras(
        build=lambda: dense(layers.BatchNormalization())
    ),
    "model.fit with a momentum of the workers": lambda: fit_by_keras(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9 / ALL_RANKS.size())
    ),
    "schedule of the workers": lambda: train(optimizer=keras.optimizers.SGD(own_decay())),
    "units of the workers": lambda: train(lambda: dense(layers.Dense(4 * ALL_RANKS.size()))),
    "order of the workers": lambda: train(
        x=X[order_of_the_workers()], y=Y[order_of_the_workers()], fit={"shuffle": False}
    ),
    "file of all workers": lambda: train(x=from_a_file_of_all_workers()),
    "loss over the workers": lambda: train(
        loss=loss_over_the_workers, optimizer=keras.optimizers.SGD(0.01)
    ),
    "dropout": lambda: train(lambda: dense(layers.Dropout(0.5))),
    "weights of the workers": lambda: train(
        lambda: dense(
            layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.1 * ALL_RANKS.size()))
        )
    ),
}
UNCLEAR: dict[str, Callable[[], None]] = {
    "data without a seed": lambda: train(x=(both := unseeded())[0], y=both[1]),
    "noise": lambda: train(lambda: dense(Noise())),
}


def _dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def case_record() -> None:
    """Each training twice where there is one rank: the second time with its batches turned round."""
    for order in ("forwards", "backwards") if ALL_RANKS.size() == 1 else ("forwards",):
        for name, script in (SAME | DIFFERENT | UNCLEAR).items():
            if name not in os.environ["NAMES"].split(";"):
                continue
            folder = Path(os.environ["FOLDER"], str(ALL_RANKS.size()), order, name)
            if ALL_RANKS.rank() == 0:
                folder.mkdir(parents=True)
            ALL_RANKS.exchange(name, "folder")  # All ranks write to it.
            keras.backend.clear_session()
            keras.utils.set_random_seed(0)
            recorder = Recorder(folder, STEPS, order == "backwards")
            with (
                contextlib.suppress(EnoughSteps),
                recorded_files(folder),
                recorded_fits(recorder),
                recorded_loops(recorder),
            ):
                script()
