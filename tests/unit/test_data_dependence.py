"""Steps that decide by numbers of a worker's own examples are found in their graph; Keras's are not. No ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.mpi_ops import rank_op
from keras import layers, ops

from hvdtrain.errors import UsageError
from hvdtrain.strategies.data_dependence import with_decision_warnings

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


def said_of(model: keras.Model, x: Any, y: Any, sizes: Sequence[int] = (3,)) -> list[str]:
    model(x)
    told: dict[str, None] = {}
    step = with_decision_warnings(model, model.train_step, told.setdefault)
    for size in sizes:
        signature = [tf.TensorSpec([size, *a.shape[1:]], a.dtype) for a in (x, y)]
        tf.function(step, autograph=False).get_concrete_function(tuple(signature))
    return [*told]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (times(lambda loss, _: kept(loss)), "loss < 1.5"),
        (times(lambda loss, _: tf.cond(loss > 2, lambda: 0.0, lambda: 1.0)), "tf.cond"),
        (times(lambda loss, _: ops.where(ops.isfinite(loss), 1.0, 0.0)), "ops.where"),
        (times(lambda loss, _: ops.minimum(loss, 1.0)), "ops.minimum"),
        (times(lambda _, model: tf.cast(model.seen.result() < 1, tf.float32)), "model.seen"),
        (times(lambda loss, _: tf.function(kept)(loss)), "loss < 1.5"),
        (lambda g, *_: tf.function(lambda one: [tf.clip_by_value(x, -9, 9) for x in one])(g), "clip_by_value"),
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
    assert "test_data_dependence.py:" in said
    assert code in said


@pytest.mark.parametrize(
    "change",
    [
        times(lambda loss, _: 0.5 * tf.stop_gradient(loss)),
        times(lambda _, model: tf.cast(model.steps % 2 == 0, tf.float32)),
        times(lambda *_: tf.cast(tf.random.uniform([]) < 0.5, tf.float32)),
        lambda g, loss, model: tf.function(
            lambda *g: tf.cond(model.steps < 3, lambda: [*g], lambda: [loss * one for one in g])
        )(*g),
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
@pytest.mark.slow
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


def in_front(e: Any, w: Any) -> Any:
    """Of one value for each example."""
    return tf.where(tf.maximum(e, 0.1) > 0.2, e * w, e)


@pytest.mark.parametrize("change", [in_front, tf.function(in_front)], ids=["", "function"])
def test_none_that_each_example_makes_for_itself(change: Change) -> None:
    """Whose numbers have the shape of the gradient's slices."""

    class Looking(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = layers.Embedding(9, 4), layers.Dense(2)
            self.scale = self.add_weight(shape=(1,))

        def call(self, x: Any) -> Any:
            return self.out(change(self.table(x[:, 0]), tf.identity(self.scale)))

    model = Looking()
    model.compile("sgd", "mse", jit_compile=False)
    assert not said_of(model, np.ones((3, 1), "int32"), np.ones((3, 2), "float32"))


def test_a_share_of_one_example_is_not_looked_at_again() -> None:
    """Its numbers are of a whole batch, by their shape."""

    class Hinge(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.maximum(0.0, 1 - tf.squeeze(y) * tf.squeeze(self(x))))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = Hinge()
    model.compile("sgd")
    assert not said_of(model, np.ones((3, 4), "float32"), np.ones((3, 1), "float32"), sizes=(3, 1))


def conditional(choose: Callable[[Any, Any], Any]) -> Any:
    class Conditional(Stepping):
        """Applies its gradients or not."""

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x) - y))
            gradients = self.change(tape.gradient(loss, self.trainable_variables), loss, self)

            def apply() -> int:
                self.optimizer.apply(gradients, self.trainable_variables)
                return 0

            tf.cond(choose(loss, self), apply, lambda: 0)
            return {"loss": loss}

    return Conditional


def test_updates_in_a_branch() -> None:
    """Whose gradients come from outside of it."""
    clipped = conditional(lambda _, model: model.steps % 2 == 0)(
        lambda g, *_: [tf.clip_by_value(one, -9, 9) for one in g]
    )
    clipped.compile("sgd")
    (said,) = said_of(clipped, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))
    assert "clip_by_value" in said
    plain = conditional(lambda _, model: model.steps % 2 == 0)(lambda g, *_: g)
    plain.compile("sgd")
    assert not said_of(plain, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))


class Communicating(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        rank = tf.cast(rank_op(), tf.float32)
        super().apply([rank * g for g in grads], trainable_variables)


def test_updates_in_a_branch_that_a_worker_takes_alone() -> None:
    model = conditional(lambda loss, _: loss < 2)(lambda g, *_: g)
    model.compile(Communicating())
    with pytest.raises(UsageError, match=r"applies gradients or not.*tf\.cond"):
        said_of(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))
    model = conditional(lambda _, model: model.steps < 2)(lambda g, *_: g)
    model.compile(Communicating())
    assert not said_of(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))


def test_gradients_that_no_graph_computes() -> None:
    """Sums that the model keeps in variables."""
    model = Stepping(lambda *_: sums)
    model(np.ones((3, 4), "float32"))
    sums = [tf.Variable(tf.ones(v.shape)) for v in model.trainable_variables]
    model.compile("sgd")
    assert not said_of(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))
