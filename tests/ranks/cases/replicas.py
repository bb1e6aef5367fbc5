"""Trainer with several replicas in this process, or a stand-in for a TPU, against plain Keras with the whole batch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import stand_in
import tensorflow as tf
from against_keras import (
    BATCH,
    EPOCHS,
    PADDED,
    RNG,
    SOME_IGNORED,
    WEIGHT,
    Y,
    apart,
    inputs,
    mixed_model,
    momentum,
    plain,
    tagging_model,
    vector_model,
    vectors,
)
from results import Apart
from small import crossentropy, difference, layers, optimizers, weights
from trainer_exact import (
    SGD,
    Activity,
    custom_model,
    guide_model,
)
from trainer_exact import case_adam as case_adam
from trainer_exact import case_sgd as case_sgd

import hvdtrain
from hvdtrain.keras_internals.building import build_model
from hvdtrain.keras_internals.metric_calls import Calls
from hvdtrain.keras_internals.replica_scope import current_replica, pure_steps
from hvdtrain.strategies.replica_steps import Found, ReplicaSteps
from hvdtrain.strategy_names import STRATEGY

ON_TPU = os.environ[STRATEGY] == "tpu"
EVEN = 5 * BATCH
"""Examples of 5 full batches."""


stand_in.install()


def even() -> tuple[np.ndarray, np.ndarray]:
    x, y = vectors()
    return x[:EVEN], y[:EVEN]


def trained(
    make: Callable[[], keras.Model],
    optimizer: Callable[[], Any],
    data: tuple,
    compiled: Callable[[], dict[str, Any]],
    fit: dict[str, Any] | None = None,
    reference: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Apart]:
    """How far weights and history of the Trainer are from plain Keras; `apart` also evaluates and predicts."""
    x, y, *weight = data
    wanted = plain(make, optimizer(), data, fit, compiled() | (reference or {}))
    trainer = trainer_of(make, optimizer=optimizer(), **compiled() | arguments)
    history = trainer.fit(
        x, y, *weight, **{"epochs": EPOCHS, "shuffle": False, "verbose": 0} | (fit or {})
    ).history
    return {
        "weights": wanted.apart(weights(trainer.model), "weights"),
        "history": wanted.apart(history, "history", "relative"),
    }


def vector(
    optimizer: Callable[[], Any] = momentum, data: tuple = (), make: Any = vector_model, **more: Any
) -> dict[str, Apart]:
    compiled = {"loss": "mse"} | (
        {} if make in (custom_model, guide_model) else {"metrics": ["mae"]}
    )
    return trained(make, optimizer, data or vectors(), lambda: compiled, **more)


def case_losses() -> dict[str, Any]:
    """Reductions that do not average over examples, masks."""
    found = {}
    for reduction in ("none", "sum", "mean_with_sample_weight"):
        loss = crossentropy(reduction=reduction)
        found[reduction] = trained(
            mixed_model, lambda: SGD(0.003), (inputs(), Y, WEIGHT), lambda loss=loss: {"loss": loss}
        )
    found["ignore_class"] = trained(
        mixed_model,
        momentum,
        (inputs(), SOME_IGNORED),
        lambda: {"loss": crossentropy(ignore_class=-1)},
    )
    labels = RNG.integers(0, 5, PADDED.shape)
    by_word = np.repeat(WEIGHT[:, None], PADDED.shape[1], axis=1)
    found["mask, weights"] = apart(
        tagging_model,
        lambda: SGD(0.5),
        (PADDED, labels, by_word),
        compiled=lambda: {
            "loss": crossentropy(reduction="mean_with_sample_weight"),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy"],
        },
    )
    return found


def two_outputs() -> keras.Model:
    words = layers.Input((6,), dtype="int32")
    word = layers.Embedding(20, 4, mask_zero=True)(words)
    tags, again = layers.Dense(5, name="tags")(word), layers.Dense(5, name="again")(word)
    mean = Activity()(layers.GlobalAveragePooling1D()(word))
    flag = layers.Dense(1, activation="sigmoid", name="flag")(mean)
    return keras.Model(words, {"tags": tags, "again": again, "flag": flag})


def case_two_outputs() -> dict[str, Any]:
    """Loss weights, one loss object for two masked outputs, metrics with many counters, add_loss."""

    def compiled() -> dict[str, Any]:
        shared = crossentropy()
        counters = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
        return {
            "loss": {"tags": shared, "again": shared, "flag": "binary_crossentropy"},
            "loss_weights": {"tags": 1.0, "again": 0.5, "flag": 2.0},
            "metrics": {"flag": counters, "tags": ["accuracy"]},
        }

    labels = {
        "tags": RNG.integers(0, 5, PADDED.shape),
        "again": RNG.integers(0, 5, PADDED.shape),
        "flag": RNG.integers(0, 2, (len(PADDED), 1)),
    }
    # Keras weighs each output's loss by the batch's size only where the size is known; eagerly it is.
    eager: dict[str, Any] = {"reference": {"run_eagerly": True}, "fit": {"epochs": 2}}
    return apart(two_outputs, momentum, (PADDED, labels), compiled=compiled, **eager)


def constrained() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )


def decaying() -> Any:
    optimizer = optimizers.AdamW(1e-2, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def case_optimizers() -> dict[str, Any]:
    """What comes between gradients and weights: it must see the whole batch's gradients."""
    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}
    found = {
        "clipping, moving average, scheduler": vector(
            lambda: SGD(0.5, momentum=0.9, clipnorm=0.05, **average), fit={"callbacks": [halves]}
        ),
        "accumulation": vector(
            lambda: SGD(0.05, momentum=0.9, global_clipnorm=0.1, gradient_accumulation_steps=3)
        ),
        "decay, constraint, penalty": vector(decaying, make=constrained),
        "decay of its own": vector(
            lambda: optimizers.Muon(0.01, weight_decay=0.1, adam_weight_decay=0.5),
            fit={"epochs": 2},
        ),
    }
    # One example whose gradient overflows once it is scaled: its batch is left out, and the scale halved.
    x, y = vectors()
    far = np.where(np.arange(len(y))[:, None] == 20, np.float32(1e18), y)
    found["loss scaling"] = vector(
        lambda: optimizers.LossScaleOptimizer(
            SGD(0.05, momentum=0.9), initial_scale=2.0**80, dynamic_growth_steps=3
        ),
        (x, far),
    )
    return found


def case_ways_of_running() -> dict[str, Any]:
    found = {
        "three steps at once": vector(steps_per_execution=3),
        "own train_step": vector(make=custom_model, steps_per_execution=2),
        "own train_step, by the guide": vector(make=guide_model),
    }
    if not ON_TPU:
        found["run_eagerly"] = vector(run_eagerly=True, fit={"epochs": 1})
    return found


def trainer_of(make: Any, loss: Any = "mse", **arguments: Any) -> hvdtrain.Trainer:
    optimizer = arguments.pop("optimizer", None) or SGD(0.1)
    return hvdtrain.Trainer(
        make, optimizer, loss, **{"global_batch_size": BATCH, "seed": 1} | arguments
    )


class Seen(layers.Layer):
    """Notes where it computes, and on how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def call(self, x: Any) -> Any:
        if current_replica() is not None:
            device = tf.identity(x).device
            self.seen.add((x.shape[0], device.rsplit("/", 1)[-1]))
        return x


def case_division() -> dict[str, Any]:
    """Each replica computes half of the rows on its device, and all of a tail that cannot be halved."""
    seen = Seen()
    trainer = trainer_of(
        lambda: keras.Sequential([layers.Input((3,)), seen, layers.Dense(1)]),
        optimizer=optimizers.Adam(),
        metrics=["mae"],
    )
    trainer.fit(*vectors(), verbose=0)
    trainer.evaluate(*vectors())
    trainer.predict(vectors()[0])
    held = [v.value for v in (*trainer.model.variables, *trainer.model.optimizer.variables)]
    copies = [getattr(v, "values", (v,)) for v in held]
    counted = [v.value for m in trainer.model.metrics for v in m.variables]
    return {
        "seen": sorted(seen.seen),
        "workers": trainer.strategy.workers,
        "copies": sorted({len(c) for c in copies}),
        "copies of metrics": sorted({len(getattr(v, "values", (v,))) for v in counted}),
        "first": sorted({c[0].device.rsplit("/", 1)[-1] for c in copies}),
        "replicas agree": max(
            float(np.abs(one.numpy() - c[0].numpy()).max()) for c in copies for one in c
        ),
    }


def case_one_program() -> dict[str, Any]:
    """A step, its all-reduce and its update included, compiles as one XLA program."""
    x, y = vectors()
    real = 5
    wanted = plain(
        constrained, SGD(0.1, momentum=0.9), (x[:real], y[:real]), {"epochs": 1}, {"loss": "mse"}
    )
    keras.utils.set_random_seed(1)
    compiled = constrained()
    compiled.compile(SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    build_model(compiled, (keras.KerasTensor((BATCH, 3)), keras.KerasTensor((BATCH, 1))))
    steps = ReplicaSteps(compiled, tf.distribute.get_strategy(), BATCH, parameter_device=None)
    states = [tf.convert_to_tensor(v.value) for m in compiled.metrics for v in m.variables]

    @tf.function(jit_compile=True, autograph=False)
    def program(rows: Any, states: Any) -> Any:
        with pure_steps(compiled):
            return steps.on_replica("train_step", True, rows, states, Found(), Calls())

    program(tuple(tf.constant(part[:real]) for part in (x, y)), states)
    return {"weights": wanted.apart(weights(compiled), "weights")}


def normalized(**arguments: Any) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential(
        [layers.Input((3,)), layers.BatchNormalization(**arguments), layers.Dense(1)]
    )


def case_normalization() -> dict[str, Any]:
    """Synchronized statistics are those of the whole batch; others are the average of the replicas'."""
    wanted = plain(normalized(), momentum(), even(), {}, {"loss": "mse"})
    synced = trainer_of(normalized(synchronized=True), optimizer=momentum())
    synced.fit(*even(), epochs=EPOCHS, shuffle=False, verbose=0)
    # Momentum 0 keeps the last batch only: a tail of 1, on both replicas.
    x = np.concatenate([np.zeros((4, 3)), [[1, 2, 3]]]).astype("float32")
    x[:4, 0] = [0, 1, 2, 3]
    means = {}
    for examples in (4, 5):
        own = trainer_of(normalized(momentum=0.0), global_batch_size=4)
        own.fit(x[:examples], x[:examples, :1], shuffle=False, verbose=0)
        means[str(examples)] = [float(v) for v in own.model.layers[0].moving_mean.numpy()]
        means[f"{examples}, variance"] = [
            float(v) for v in own.model.layers[0].moving_variance.numpy()
        ]
    return {
        "synchronized": wanted.apart([v.numpy() for v in synced.model.weights], "all"),
        **means,
    }


def case_seeds() -> dict[str, Any]:
    """Two rows of ones, one on each replica, through dropout: replicas with equal masks would never disagree."""

    def make() -> keras.Model:
        return keras.Sequential(
            [
                layers.Input((64,)),
                layers.Dropout(0.5, seed=1),
                layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )

    trainer = trainer_of(make, optimizer=SGD(1.0), global_batch_size=2)
    trainer.fit(np.ones((2, 64), "float32"), np.ones((2, 1), "float32"), verbose=0)
    (weight,) = weights(trainer.model)
    before = trainer.model.layers[0].seed_generator.state.numpy().tolist()
    trainer.fit(np.ones((2, 64), "float32"), np.ones((2, 1), "float32"), verbose=0)
    after = trainer.model.layers[0].seed_generator.state.numpy().tolist()
    return {"steps": sorted({round(float(w), 3) for w in weight[:, 0]}), "seeds": [before, after]}


def case_precision() -> dict[str, Any]:
    found = {}
    for precision in ("mixed_bfloat16", "mixed_float16"):
        try:
            trainer = trainer_of(vector_model, optimizer=SGD(0.05), precision=precision)
            compute = trainer.model.layers[0].compute_dtype
            trainer.fit(*vectors(), epochs=2, shuffle=False, verbose=0)
            predicted = trainer.predict(vectors()[0])
            wanted = plain(vector_model, SGD(0.05), vectors(), {"epochs": 2}, {"loss": "mse"})
        finally:
            keras.config.set_dtype_policy("float32")
        found[precision] = {
            "compute": compute,
            "weights": wanted.apart(weights(trainer.model), "weights"),
            "predictions": len(predicted),
            "optimizer": type(trainer.model.optimizer).__name__,
        }
    return found


def case_too_large_for_float16() -> dict[str, float]:
    """A gradient of 3, times the first scale: float16 holds the half that a replica finds, and not all of it."""
    x, y = np.ones((BATCH, 1)), np.full((BATCH, 1), 1.5)

    def make() -> keras.Model:
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        return keras.Sequential([layers.Input((1,)), dense])

    try:
        trainer = trainer_of(make, precision="mixed_float16")
        trainer.fit(x, y, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = trainer.model.optimizer
    return {
        "scale": float(optimizer.dynamic_scale / optimizer.initial_scale),
        "weight": float(weights(trainer.model)[0][0, 0]),
    }


def case_made_elsewhere() -> dict[str, Any]:
    """A model that was trained on the device of another replica before it got a Trainer (central storage)."""
    x, y = vectors()
    models = []
    for device in ("CPU:0", "CPU:1"):
        keras.utils.set_random_seed(1)
        with tf.device(device):
            model = vector_model()
            model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        models.append(model)
    wanted, model = models
    wanted.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    hvdtrain.Trainer(model, global_batch_size=BATCH).fit(x, y, shuffle=False, verbose=0)
    held = [v.value.device for v in [*model.variables, *model.optimizer.variables]]
    return {
        "devices": sorted({device.rsplit("/", 1)[-1] for device in held}),
        "weights": difference(weights(model), weights(wanted)),
    }


def case_saved_model() -> dict[str, Any]:
    """The file goes on in plain Keras and in another Trainer, with the optimizer's state; float() reads scalars."""
    x, y = vectors()
    trainer = trainer_of(vector_model, optimizer=optimizers.Adam(0.01))
    trainer.fit(x, y, epochs=2, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "model.keras")
        loaded = keras.saving.load_model(Path(folder) / "model.keras")
        again = trainer_of(vector_model, optimizer=optimizers.Adam(0.5))
        again.load(Path(folder) / "model.keras")
    outputs = difference([trainer.predict(x)], [loaded.predict(x, verbose=0)])
    trainer.fit(x, y, epochs=1, shuffle=False, verbose=0)
    again.fit(x, y, epochs=1, shuffle=False, verbose=0)
    loaded.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    held = [[*t.model.variables, *t.model.optimizer.variables] for t in (trainer, again)]
    rate = trainer.model.optimizer.learning_rate
    return {
        "outputs": outputs,
        "went on": difference(weights(trainer.model), weights(loaded)),
        "another Trainer": difference(*[[v.numpy() for v in each] for each in held]),
        "iterations": [int(m.optimizer.iterations.numpy()) for m in (trainer.model, loaded)],
        "rate": float(rate),
    }


class Counting(keras.metrics.Metric):
    """Adds up errors, whatever the weights."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return self.total


class Measuring(layers.Layer):
    """Has a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.level = keras.metrics.Mean(name="level")

    def call(self, x: Any) -> Any:
        self.level.update_state(x)
        return x


def scalar(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def case_tails() -> dict[str, Any]:
    """A last batch of three, which two replicas cannot halve: it counts as in one process, whatever the model does."""
    x, y = (part[: 2 * BATCH + 3] for part in vectors())

    def one(make: Any, compiled: Callable[[], dict[str, Any]] = dict) -> dict[str, Any]:
        return trained(make, momentum, (x, y), lambda: {"loss": "mse"} | compiled(), {"epochs": 2})

    def followed_by(layer: Any) -> keras.Model:
        return keras.Sequential([layers.Input((3,)), layer, layers.Dense(1)])

    return {
        "layer's metric": one(lambda: followed_by(Measuring())),
        "own step": one(custom_model),
        "added loss": one(lambda: followed_by(layers.Dense(2, activity_regularizer="l2"))),
        "scalar loss": one(vector_model, lambda: {"loss": scalar}),
        "scalar metric": one(vector_model, lambda: {"metrics": [scalar]}),
        "metric that ignores weights": one(vector_model, lambda: {"metrics": [Counting()]}),
    }
