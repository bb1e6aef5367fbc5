"""Which logs of a step follow from the states of its metrics alone: found by running it again. No ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.strategies.state_logs import StateLogs

X = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
DATA = (tf.constant(X), tf.constant(X[:, :1]))


class Language(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.norm = layers.BatchNormalization()
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(self.norm(x, training=training))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {
            "loss": self.tracker.result(),
            "perplexity": ops.exp(self.tracker.result()),
            "last": loss,
            "both": loss + self.tracker.result(),
        }


class Sums(Language):
    def train_step(self, data: Any) -> Any:
        x, y = data
        super().train_step(data)
        errors = ops.abs(y - x)
        return {
            "examples": ops.shape(x)[0],
            "of each output": ops.sum(errors, axis=0),
            "one more": 1 + ops.shape(x)[0],
            "mean": ops.mean(errors),
            "largest": ops.max(ops.relu(x)),
            "norm": ops.norm(errors),
            "zero": 0.0 * ops.sum(errors),
            "constant": 2.0,
            "share": 1.0 / ops.cast(ops.shape(x)[0], "float32"),
        }


class OnlyThis(Language):
    def train_step(self, data: Any) -> Any:
        assert np.any(data[0])
        return super().train_step(data)


def found(kind: type) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile("sgd", jit_compile=False)
    model.train_step(DATA)
    model.tracker.update_state(3.0)  # What the other ranks have counted.
    before = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    wanted = float(np.exp(model.tracker.result()))
    logs = StateLogs(model, model.train_step, thread_ranks(1)[0])
    values = [logs.values(["perplexity", "last", "both"], DATA) for _ in range(2)]
    assert values[0] == values[1]
    after = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    return {name: value - wanted for name, value in values[0].items()}


def test_what_follows_from_states() -> None:
    # TensorFlow's exp in float32 against NumPy's: a rounding or two of a number below 100.
    assert found(Language) == {"perplexity": pytest.approx(0.0, abs=2e-5)}


def test_a_step_that_does_not_run_on_zeros() -> None:
    assert found(OnlyThis) == {}


def test_sums_over_the_examples() -> None:
    keras.utils.set_random_seed(0)
    model = Sums()
    model.compile("sgd", jit_compile=False)
    names = [*model.train_step(DATA)]
    for examples in (1, 5):
        data = tf.nest.map_structure(lambda leaf, n=examples: leaf[:n], DATA)
        logs = StateLogs(model, model.train_step, thread_ranks(1)[0])
        assert logs.sums(names, data) == ["examples", "of each output"]


def test_what_depends_on_the_number_of_examples_has_no_value_of_its_own() -> None:
    def values(ranks: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(0)
        model = Sums()
        model.compile("sgd", jit_compile=False)
        own = tf.nest.map_structure(lambda leaf: leaf[: 2 + ranks.rank()], DATA)
        return StateLogs(model, model.train_step, ranks).values(["constant", "share"], own)

    assert run_ranks(thread_ranks(2), values) == [{"constant": 2.0}] * 2
