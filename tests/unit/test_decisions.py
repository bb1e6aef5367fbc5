"""Steps that decide by numbers of a worker's own examples are found in their graph; Keras's are not. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from hvdtrain.strategies.decisions import telling_decisions

Change = Callable[[Any, Any, Any], Any]


class Stepping(keras.Model):
    """A step that does something with its gradients, knowing the loss and the model."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.dense = layers.Dense(2)
        self.change = change
        self.seen = keras.metrics.Mean()
        self.steps = self.add_weight(shape=(), trainable=False, dtype="int32")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - y))
        self.seen.update_state(loss)
        gradients = self.change(tape.gradient(loss, self.trainable_variables), loss, self)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def times(factor: Callable[[Any, Any], Any]) -> Change:
    return lambda gradients, loss, model: [factor(loss, model) * g for g in gradients]


def kept(loss: Any) -> Any:
    return tf.cast(loss < 1.5, tf.float32)


def said_of(model: keras.Model, x: Any, y: Any) -> list[str]:
    model(x)
    told: list[str] = []
    step = telling_decisions(model, model.train_step, told.append)
    signature = tf.nest.map_structure(lambda a: tf.TensorSpec([3, *a.shape[1:]], a.dtype), (x, y))
    tf.function(step, autograph=False).get_concrete_function(signature)
    return told


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (times(lambda loss, _: kept(loss)), "loss < 1.5"),
        (times(lambda loss, _: tf.cond(loss > 2, lambda: 0.0, lambda: 1.0)), "tf.cond"),
        (times(lambda loss, _: ops.where(ops.isfinite(loss), 1.0, 0.0)), "ops.where"),
        (times(lambda loss, _: ops.minimum(loss, 1.0)), "ops.minimum"),
        (times(lambda _, model: tf.cast(model.seen.result() < 1, tf.float32)), "model.seen"),
        (times(lambda loss, _: tf.function(kept)(loss)), "loss < 1.5"),
        (lambda g, *_: tf.clip_by_global_norm(g, 1e6)[0], "clip_by_global_norm"),
        (lambda g, *_: [tf.clip_by_norm(one, 1e6) for one in g], "clip_by_norm"),
        (lambda g, *_: [0.5 * tf.clip_by_value(one, -9, 9) for one in g], "clip_by_value"),
        (lambda g, *_: [tf.where(tf.abs(one) < 9, one, 0.0) for one in g], "tf.where"),
    ],
)  # fmt: skip
def test_found(change: Change, code: str) -> None:
    model = Stepping(change)
    model.compile("sgd")
    (said,) = said_of(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))
    assert "test_decisions.py:" in said
    assert code in said


@pytest.mark.parametrize(
    "change",
    [
        times(lambda loss, _: 0.5 * tf.stop_gradient(loss)),
        times(lambda _, model: tf.cast(model.steps % 2 == 0, tf.float32)),
        times(lambda *_: tf.cast(tf.random.uniform([]) < 0.5, tf.float32)),
        lambda g, _, model: [
            one + 0.1 * tf.clip_by_value(v, -1, 1)
            for one, v in zip(g, model.trainable_variables, strict=True)
        ],
    ],
)
def test_none_by_data(change: Change) -> None:
    model = Stepping(change)
    model.compile("sgd")
    assert not said_of(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))


@pytest.mark.parametrize(
    "between",
    [
        [layers.LSTM(3), layers.Dropout(0.5), layers.BatchNormalization()],
        [layers.MultiHeadAttention(1, 2), layers.GlobalMaxPooling1D()],
        [layers.Bidirectional(layers.GRU(2)), layers.SpectralNormalization(layers.Dense(2))],
        [layers.Flatten(), layers.UnitNormalization(), layers.ReLU(6.0)],
    ],
    ids=["lstm", "attention", "gru", "flat"],
)
@pytest.mark.parametrize(
    "compiled",
    [
        {"loss": keras.losses.Huber(), "optimizer": keras.optimizers.SGD(clipnorm=0.1)},
        {
            "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "optimizer": keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(global_clipnorm=0.1, gradient_accumulation_steps=2)
            ),
            "metrics": ["mae", "accuracy", keras.metrics.R2Score()],
        },
    ],
    ids=["clipped", "scaled"],
)
def test_none_of_keras(between: list[Any], compiled: dict[str, Any]) -> None:
    words = keras.Input((5,), dtype="int32")
    found = layers.Embedding(9, 3, mask_zero=True)(words)
    for one in between:
        one = type(one).from_config(one.get_config())
        attention = isinstance(one, layers.MultiHeadAttention)
        found = one(found, found) if attention else one(found)
    model = keras.Model(words, layers.Dense(2)(found))
    optimizer = compiled["optimizer"]
    optimizer = type(optimizer).from_config(optimizer.get_config())
    model.compile(**compiled | {"optimizer": optimizer}, jit_compile=False)
    assert not said_of(model, np.ones((3, 5), "int32"), np.ones((3, 2), "float32"))
