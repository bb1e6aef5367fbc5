"""Which values of a step are means over the examples of a batch, for losses and metrics of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from keras import layers, ops

from hvdtrain.collectives.step_context import Step, require_present, without_others
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.variables import global_seed_variable
from hvdtrain.strategies.losses import make_exact
from hvdtrain.strategies.trial import unchanged
from hvdtrain.strategies.value_probe import batch_statistics, kind_of_loss, predicts_together

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype("float32")
Y = RNG.normal(size=(5, 1)).astype("float32")
SHOWN = {
    "mean": lambda errors: ops.mean(errors),
    "each": lambda errors: errors,
    "sum": lambda errors: ops.sum(errors),
    "number": lambda errors: ops.cast(ops.shape(errors)[0], "float32"),
    "constant": lambda errors: 3.0,
    "random": lambda errors: ops.max(errors) * tf.random.uniform(()),
    "largest": lambda errors: ops.max(errors),
    "spread": lambda errors: ops.max(errors) - ops.min(errors),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.set_random_seed(
        1
    )  # Before a model is made: its initializers draw their seeds then.


class Showing(keras.Model):
    """Keeps means of what it computes from the errors of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.means = {name: keras.metrics.Mean(name) for name in SHOWN}

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        errors = ops.square(y - self(x))[:, 0]
        for name, mean in self.means.items():
            mean.update_state(SHOWN[name](errors))
        return {}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(data[1] - self(data[0])))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return self.test_step(data)


def prepared(model: keras.Model, loss: Any = "mse") -> tuple[keras.Model, Any, Step]:
    data = (tf.constant(X), tf.constant(Y))
    model.compile("sgd", loss, jit_compile=False)
    model(data[0])
    model.optimizer.build(model.trainable_variables)
    make_exact(model)
    step = Step(tf.Variable(1.0), lambda divisor: divisor, share_in_loss=False)
    return model, data, step


@pytest.mark.parametrize("method", ["train_step", "test_step"])
def test_numbers_of_a_batch_that_are_no_mean(method: str) -> None:
    model, data, step = prepared(Showing())
    before = [v.numpy() for v in model.variables]
    assert batch_statistics(model, data, step, getattr(model, method)) == ["largest", "spread"]
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


class Losing(keras.Sequential):
    def __init__(self, loss_of: Any) -> None:
        super().__init__([keras.Input((4,)), layers.Dense(1)])
        self.loss_of = loss_of

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
        return self.loss_of(ops.square(y - y_pred)[:, 0])


@pytest.mark.parametrize(
    ("name", "kind"), [("mean", "mean"), ("sum", "sum"), ("largest", "other"), ("random", "")]
)
def test_kinds_of_losses(name: str, kind: str) -> None:
    model, data, step = prepared(Losing(SHOWN[name]))
    assert kind_of_loss(model, data, step) == kind


def test_a_collective_is_tried_only_by_ranks_with_the_same_examples() -> None:
    require_present([0, 1])
    with without_others([2, 3]):
        require_present([2, 3])
        with pytest.raises(UsageError, match="collective is called"):
            require_present([1, 3])


def test_the_next_random_number_is_the_same_after_a_trial() -> None:
    model, _, _ = prepared(Losing(SHOWN["mean"]))
    keras.random.normal((2,))
    before = np.array(global_seed_variable(create=False))
    with unchanged(model):
        keras.random.normal((2,))
    np.testing.assert_array_equal(np.array(global_seed_variable(create=False)), before)


class Predicting(keras.Model):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.dense = layers.Dense(2)
        self.after = step

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def predict_step(self, data: Any) -> Any:
        return self.after(self(data[0]))


@pytest.mark.parametrize(
    ("together", "step"),
    [
        (False, lambda p: p),
        (False, lambda p: {"class": ops.argmax(p, axis=1), "text": tf.strings.as_string(p)}),
        (False, lambda p: p + tf.random.uniform(p.shape)),
        (False, lambda p: ops.sum(p)),
        (False, lambda p: ops.ones((p.shape[0], p.shape[0]))),
        (False, lambda p: (p, ops.ones(7))),
        (True, lambda p: p - ops.mean(p, axis=0)),
        (True, lambda p: {"own": p, "place": ops.arange(ops.shape(p)[0])}),
        (True, lambda p: ops.softmax(p, axis=0)),
    ],
)
def test_a_prediction_of_a_part_of_a_batch(together: bool, step: Any) -> None:
    model, data, context = prepared(Predicting(step))
    assert predicts_together(model, data[:1], context) == together
