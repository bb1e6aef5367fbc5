"""Weights that are counted in a batch are found in examples without rare labels or padding. No ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.step_context import Step
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras_internals.models import trains_by_keras
from hvdtrain.strategies.complaints import does_not_add_up
from hvdtrain.strategies.losses import make_exact
from hvdtrain.strategies.probe import probe
from hvdtrain.strategies.trial import varied
from hvdtrain.strategies.value_probe import kind_of_loss

X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
NONE = np.zeros((5, 1), "float32")
FULL = np.ones((5, 1), "float32")


def entropies(y: Any, p: Any) -> Any:
    return ops.binary_crossentropy(y, p, from_logits=True)


def masked(y: Any, p: Any) -> Any:
    mask = ops.cast(ops.not_equal(y, 0), "float32")
    return ops.sum(mask * entropies(1.0 - y, p)) / ops.sum(mask)


def balanced(y: Any, p: Any) -> Any:
    positives = ops.mean(y)
    return ((1 - positives) * y * entropies(y, p) + positives * (1 - y) * entropies(y, p))[:, 0]


def weighted(y: Any, p: Any) -> Any:
    positives = ops.sum(y)
    weight = (ops.cast(ops.size(y), "float32") - positives) / (positives + 1.0)
    return ops.mean(entropies(y, p) * (1.0 + weight * y))


def of_positives(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.boolean_mask(entropies(y, p), y > 0.5))


def masked_mean(y: Any, p: Any) -> Any:
    return ops.mean(entropies(y, p) * ops.cast(ops.not_equal(y, 0), "float32"))


def masked_sum(y: Any, p: Any) -> Any:
    return ops.sum(entropies(y, p) * ops.cast(ops.not_equal(y, 0), "float32"))


def compiled(loss_of: Any, where: str) -> keras.Model:
    class Own(keras.Sequential):
        pass

    class Losing(Own):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
            return loss_of(y, y_pred)

    class Stepping(Own):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(data[1], self(data[0]))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    kind = {"loss": Own, "compute_loss": Losing, "train_step": Stepping}[where]
    model = kind([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])
    optimizer = distribute(keras.optimizers.SGD(), Reduction())
    model.compile(optimizer, loss_of if where == "loss" else None, jit_compile=False)
    return model


def tried(model: keras.Model, y: Any, data: Any = None) -> tuple[Any, Step]:
    data = data or (tf.constant(X), tf.constant(y))
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=data)
    make_exact(model)
    whole = Step(tf.Variable(1.0), lambda divisor: divisor, share_in_loss=trains_by_keras(model))
    return data, whole


COUNTED = [
    (masked, "train_step", FULL),
    (masked, "compute_loss", FULL),
    (balanced, "loss", NONE),
    (weighted, "compute_loss", NONE),
    (of_positives, "train_step", NONE),
    (of_positives, "train_step", FULL),
]


@pytest.mark.parametrize(("loss_of", "where", "y"), COUNTED)
def test_weights_that_are_counted_in_the_batch(loss_of: Any, where: str, y: Any) -> None:
    model = compiled(loss_of, where)
    found = probe(model, *tried(model, y))
    assert found.as_mean is False and not found.as_sum
    assert found.varied
    assert "once labels or padding vary" in does_not_add_up(model, [found])


@pytest.mark.parametrize("where", ["loss", "compute_loss", "train_step"])
@pytest.mark.parametrize("y", [NONE, FULL])
def test_a_mean_whose_weights_belong_to_each_example(where: str, y: Any) -> None:
    model = compiled(masked_mean, where)
    found = probe(model, *tried(model, y))
    assert found.as_mean


class Counting(layers.Layer):
    """Adds a loss: the mean of what is no padding."""

    def call(self, x: Any) -> Any:
        mask = ops.cast(ops.not_equal(x[:, -1:], 0), "float32")
        self.add_loss(ops.sum(mask * ops.square(x[:, :1])) / ops.sum(mask))
        return x


def test_a_layer_that_counts_in_the_batch() -> None:
    keras.utils.set_random_seed(0)
    words = layers.Input((3,))
    model = keras.Model(words, layers.Dense(1)(Counting()(layers.Dense(3)(words) * words)))
    model.compile(distribute(keras.optimizers.SGD(), Reduction()), "mse", jit_compile=False)
    data = (tf.constant(np.arange(1.0, 16.0, dtype="float32").reshape(5, 3)), tf.constant(NONE))
    _, step = tried(model, NONE, data)
    found = probe(model, data, step)
    assert found.as_mean is False and found.varied


def test_a_sum_is_found_where_all_gradients_are_0() -> None:
    model = compiled(masked_sum, "train_step")
    found = probe(model, *tried(model, NONE))
    assert found.as_mean is False and found.as_sum


@pytest.mark.parametrize(
    ("loss_of", "y", "kind"),
    [(masked, FULL, "other"), (weighted, NONE, "other"), (masked_mean, FULL, "mean")],
)
def test_losses_of_an_evaluation(loss_of: Any, y: Any, kind: str) -> None:
    model = compiled(loss_of, "compute_loss")
    assert kind_of_loss(model, *tried(model, y)) == kind


def test_what_varies() -> None:
    floats = tf.constant([[0.5, 1.0]])
    words = tf.constant([[3, 1, 0, 2], [5, 0, 0, 0]])
    names = tf.constant(["a", "b"])
    labels = tf.constant([0, 2], tf.uint8)
    mask = tf.constant([[[True], [False]], [[True], [True]]])
    nothing = tf.zeros((2, 0), tf.int32)
    assert varied((floats, names, nothing)) is None
    found = varied({"words": words, "names": names, "labels": labels, "mask": mask})
    assert found["names"] is names
    np.testing.assert_array_equal(found["words"], [[3, 1, 1, 0], [5, 0, 0, 0]])
    np.testing.assert_array_equal(found["labels"], [1, 2])
    assert found["labels"].dtype == tf.uint8
    np.testing.assert_array_equal(found["mask"][..., 0], [[True, True], [True, True]])
