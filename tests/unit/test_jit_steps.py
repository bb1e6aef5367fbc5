"""Steps that XLA compiles are the program that was written, collectives included; against plain Keras without XLA."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.communicator import HorovodRanks
from hvdtrain.errors import UsageError

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[1] / "ranks" / "cases" / "own_models.py"
SPEC = importlib.util.spec_from_file_location("own_models", SOURCE)
assert SPEC is not None and SPEC.loader is not None
own = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(own)

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)).astype("float32"), RNG.normal(size=(40, 1)).astype("float32")
FIT = {"epochs": 1, "shuffle": False, "verbose": 0}
EXACT = 2e-6
"""The order of float32 sums, which XLA may change, over 5 steps of Adam."""


@pytest.fixture(autouse=True)
def one_rank_that_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in elastic training: a step of one rank holds Horovod's operations, since others may come."""
    hvd.init()
    monkeypatch.setattr(HorovodRanks, "_may_grow", lambda self: True)


def assert_alike(model: keras.Model, logs: Any, plain: keras.Model, wanted: Any) -> None:
    assert set(logs) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=EXACT)


def plain_keras(kind: type) -> tuple[keras.Model, Any]:
    model = own.compiled_model(kind, own.decaying(), jit_compile=False)
    return model, model.fit(X, Y, batch_size=8, **FIT).history


@pytest.mark.parametrize("kind", own.ALL, ids=lambda kind: kind.__name__)
def test_a_step_of_the_users(kind: type) -> None:
    plain, wanted = plain_keras(kind)
    model = own.compiled_model(kind, hvd.DistributedOptimizer(own.decaying()), jit_compile=True)
    assert_alike(model, model.fit(X, Y, batch_size=8, **FIT).history, plain, wanted)
    compiled = own.compiled_model(kind, own.decaying(), jit_compile=True)
    trainer = hvdtrain.Trainer(compiled, global_batch_size=8)
    assert_alike(compiled, trainer.fit((X, Y), **FIT).history, plain, wanted)


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": {"gradient_accumulation_steps": 2}},
        {"optimizer": {"loss_scale_factor": 4.0, "global_clipnorm": 0.1}},
        {"compile": {"steps_per_execution": 3}},
    ],
    ids=["accumulation", "scale and clip", "steps_per_execution"],
)
@pytest.mark.parametrize("kind", [keras.Model, own.Twice], ids=["Keras's step", "own step"])
def test_ways_to_train(kind: type, how: dict[str, Any]) -> None:
    def made(wrap: Any, jit: bool) -> tuple[keras.Model, Any]:
        keras.utils.set_random_seed(1)
        if kind is keras.Model:
            words = layers.Input((4,))
            model = keras.Model(
                words, layers.Dense(1)(layers.LSTM(3)(layers.Reshape((4, 1))(words)))
            )
            x = np.pad(X, ((0, 0), (0, 1)))
        else:
            model, x = kind(), X
        optimizer = keras.optimizers.Adam(0.05, **how.get("optimizer", {}))
        model.compile(wrap(optimizer), "mse", jit_compile=jit, **how.get("compile", {}))
        return model, model.fit(x, Y, batch_size=8, **FIT).history

    plain, wanted = made(lambda optimizer: optimizer, jit=False)
    assert_alike(*made(hvd.DistributedOptimizer, jit=True), plain, wanted)


def test_losses_that_mask_and_weigh() -> None:
    words, tags = RNG.integers(0, 9, (40, 6)), RNG.integers(0, 5, (40, 6))
    words[:, 0] = 1

    def made(jit: bool) -> keras.Model:
        keras.utils.set_random_seed(1)
        given = layers.Input((6,), dtype="int32")
        model = keras.Model(given, layers.Dense(5)(layers.Embedding(9, 4, mask_zero=True)(given)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"], jit_compile=jit)
        return model

    plain, model = made(jit=False), made(jit=True)
    wanted = plain.fit(words, tags, batch_size=8, **FIT).history
    trainer = hvdtrain.Trainer(model, global_batch_size=8)
    assert_alike(model, trainer.fit((words, tags), **FIT).history, plain, wanted)


class Gan(keras.Model):
    """Two optimizers, or two tapes, and a compile of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = layers.Dense(1), layers.Dense(1, activation="sigmoid")

    def compile(self, optimizers: Any, tape: Any, **compiled: Any) -> None:
        super().compile(**compiled)
        self.optimizers, self.tape = optimizers, tape

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean((self.judge(y) - 1) ** 2 + self.judge(self.maker(x)) ** 2)
        self.update(self.optimizers[0], self.judge, tape, judged)
        with tf.GradientTape() as tape:
            made = tf.reduce_mean((self.judge(self.maker(x)) - 1) ** 2)
        self.update(self.optimizers[1], self.maker, tape, made)
        return {"judged": judged, "made": made}

    def update(self, optimizer: Any, layer: Any, tape: Any, loss: Any) -> None:
        variables = layer.trainable_variables
        optimizer.apply(self.tape(tape).gradient(loss, [v.value for v in variables]), variables)


def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "wrapped",
    [(hvd.DistributedOptimizer, same), (same, hvd.DistributedGradientTape)],
    ids=["two optimizers", "tape"],
)
def test_collectives_that_the_models_optimizer_does_not_know(wrapped: Any) -> None:
    def made(wrap: Any, tape: Any, jit: bool) -> tuple[keras.Model, Any]:
        keras.utils.set_random_seed(1)
        model = Gan()
        both = [wrap(keras.optimizers.Adam(rate)) for rate in (0.05, 0.02)]
        model.compile(both, tape, jit_compile=jit)
        return model, model.fit(X, Y, batch_size=8, **FIT).history

    assert_alike(*made(*wrapped, jit=True), *made(same, same, jit=False))


class Gathering(keras.losses.MeanSquaredError):
    """A loss that communicates, in training and in evaluation."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(hvd.allgather(y_true), hvd.allgather(y_pred))


def test_a_loss_that_communicates() -> None:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), Gathering(), jit_compile=True
    )
    before = model.get_weights()
    model.fit(X, Y, batch_size=8, **FIT)
    assert not np.array_equal(model.get_weights()[0], before[0])
    wanted = np.mean((model.predict(X, verbose=0) - Y) ** 2)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(wanted, rel=1e-5)


def test_xla_compiles_the_step() -> None:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    marked: dict[str, bool] = {}
    step = model.train_step

    def watched(data: Any) -> Any:
        logs = step(data)
        for operation in tf.compat.v1.get_default_graph().get_operations():
            found = operation.node_def.attr["_XlaCompile"].b
            marked[operation.type] = marked.get(operation.type, True) and found
        return logs

    model.train_step = watched
    model.fit(X, Y, batch_size=8, **FIT)
    assert {"MatMul", "HorovodAllreduce"} <= set(marked)
    assert all(marked[name] for name in ("MatMul", "HorovodAllreduce"))
    assert model.jit_compile  # Given back.


@pytest.mark.parametrize("what", ["tape", "optimizer", "collective"])
def test_inside_a_function_that_xla_compiles_as_a_whole(what: str) -> None:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    plain = keras.optimizers.SGD(0.1)
    optimizer = hvd.DistributedOptimizer(plain) if what == "optimizer" else plain

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if what == "collective":
            return hvd.allreduce(loss)
        tape = hvd.DistributedGradientTape(tape) if what == "tape" else tape
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    with pytest.raises(UsageError, match="remove jit_compile=True"):
        tf.function(step, jit_compile=True, autograph=False)(X, Y)

    # The second way that the message names.
    def scoped(x: Any, y: Any) -> Any:
        with tf.xla.experimental.jit_scope():
            return step(x, y)

    assert np.isfinite(tf.function(scoped, autograph=False)(X, Y))
