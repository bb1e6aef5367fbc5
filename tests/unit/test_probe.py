"""Which models' gradients are those of their parts, added up: found by trying. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.step_context import Step
from hvdtrain.keras import SyncBatchNormalization
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras_internals.models import trains_by_keras
from hvdtrain.strategies import batch_dependence
from hvdtrain.strategies.losses import make_exact
from hvdtrain.strategies.probe import DRAWS, WAITS, Verdict, probe, state_of
from hvdtrain.strategies.training_state import shared_state

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype("float32")
Y = RNG.normal(size=(5, 2)).astype("float32")
WORDS = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0], [1, 1, 1], [2, 0, 0]])
TAGS = RNG.integers(0, 2, (5, 3))


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.set_random_seed(1)


def dense(**kwargs: Any) -> keras.Model:
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(3, "tanh", **kwargs), layers.Dense(2, **kwargs)]
    )


def compiled(model: keras.Model, loss: Any = "mse", **kwargs: Any) -> keras.Model:
    model.compile(
        distribute(keras.optimizers.SGD(), Reduction()), loss, jit_compile=False, **kwargs
    )
    return model


class Own(keras.Model):
    """A dense model with something of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = layers.Dense(3, "tanh")
        self.two = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


def own_step(loss_of: Callable[[Any, Any], Any], change: Any = lambda gradients: gradients) -> Any:
    class Stepping(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(y, self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(change(gradients), self.trainable_variables)
            return {"loss": loss}

    return compiled(Stepping(), None)


def own_loss(loss_of: Callable[[Any, Any], Any]) -> Any:
    class Losing(Own):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return loss_of(y, y_pred)

    return compiled(Losing())


def adding(loss_of: Callable[[Any], Any]) -> Any:
    class Adding(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(loss_of(x))
            return x

    return compiled(keras.Sequential([layers.Input((4,)), layers.Dense(2), Adding()]))


class Gan(Own):
    """Two optimizers, each for a part of the model."""

    def compile(self, **kwargs: Any) -> None:
        super().compile(optimizer="sgd")
        self.other = keras.optimizers.SGD()

    def train_step(self, data: Any) -> Any:
        x, y = data
        for optimizer, layer in ((self.optimizer, self.one), (self.other, self.two)):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x) - y))
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)
        return {"loss": loss}


class Sampling(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class Mixing(layers.Layer):
    """Each example sees all others."""

    def call(self, x: Any) -> Any:
        return ops.tensordot(x, ops.tensordot(x, x, axes=[[0], [0]]), axes=1)


def gan() -> keras.Model:
    model = Gan()
    model.compile()
    return model


def tagger(**kwargs: Any) -> keras.Model:
    words = layers.Input((3,), dtype="int32")
    word = layers.Embedding(9, 4, mask_zero=True)(words)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)
    return compiled(
        keras.Model(words, layers.Dense(2)(layers.GRU(3, return_sequences=True)(word))), loss
    )


def squares(y: Any, p: Any) -> Any:
    return ops.square(ops.cast(p, "float32") - y)


def contrastive(y: Any, p: Any) -> Any:
    logits = ops.matmul(p, ops.transpose(y))
    return ops.mean(
        ops.categorical_crossentropy(ops.eye(ops.shape(y)[0]), logits, from_logits=True)
    )


def tutorial(y: Any, p: Any) -> Any:
    mask = ops.cast(y > 0, "float32")
    return ops.sum(squares(y, p) * mask) / ops.sum(mask)


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, 1e-3)[0]


def normal() -> keras.Model:
    return compiled(
        keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(3),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(2),
            ]
        )
    )


def half(policy: str) -> keras.Model:
    return compiled(dense(dtype=policy))


def first_of(outputs: int) -> keras.Model:
    """Only the first of its outputs has a loss. Keras takes as many rows of the labels for those of each output."""
    inputs = keras.Input((4,))
    heads = [layers.Dense(2)(inputs) for _ in range(outputs)]
    return compiled(keras.Model(inputs, heads), ["mse", *[None] * (outputs - 1)])


AS_MEAN = {
    **{f"loss_of_one_of_{n}": lambda n=n: first_of(n) for n in (2, 3, 5)},
    "mean": lambda: compiled(dense()),
    "sum": lambda: compiled(dense(), keras.losses.MeanSquaredError(reduction="sum")),
    "no reduction": lambda: compiled(dense(), keras.losses.MeanSquaredError(reduction=None)),
    "by weights": lambda: compiled(
        dense(), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    ),
    "penalties": lambda: compiled(dense(kernel_regularizer="l2", activity_regularizer="l2")),
    "batch normalization and dropout": normal,
    "float16": lambda: half("mixed_float16"),
    "bfloat16": lambda: half("mixed_bfloat16"),
    "one number": lambda: compiled(dense(), lambda y, p: ops.mean(squares(y, p))),
    "compute_loss": lambda: own_loss(lambda y, p: ops.mean(squares(y, p))),
    "compute_loss of vectors": lambda: own_loss(lambda y, p: ops.mean(squares(y, p), axis=-1)),
    "train_step": lambda: own_step(lambda y, p: ops.mean(squares(y, p))),
    "add_loss": lambda: adding(lambda x: 0.1 * ops.mean(ops.square(x))),
    "two optimizers": gan,
}
AS_SUM = {
    "compute_loss": lambda: own_loss(lambda y, p: ops.sum(squares(y, p))),
    "train_step": lambda: own_step(lambda y, p: ops.sum(squares(y, p))),
}
NEITHER = {
    "contrastive": lambda: compiled(dense(), contrastive),
    "root of the mean": lambda: compiled(dense(), lambda y, p: ops.sqrt(ops.mean(squares(y, p)))),
    "by what the batch holds": lambda: own_step(tutorial),
    "add_loss of a sum": lambda: adding(lambda x: 0.1 * ops.sum(ops.square(x))),
    "clipped": lambda: own_step(lambda y, p: ops.mean(squares(y, p)), clipped),
    "mixing": lambda: compiled(keras.Sequential([layers.Input((4,)), Mixing(), layers.Dense(2)])),
}


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Unlucky ones make the root of a mean look like a mean."""
    keras.utils.set_random_seed(0)


def verdict(model: keras.Model, x: Any = X, y: Any = Y) -> Verdict:
    data = (tf.constant(x), tf.constant(y))
    model(data[0])
    model.optimizer.build(model.trainable_variables)
    if trains_by_keras(model):
        model._symbolic_build(data_batch=data)
    make_exact(model)
    before = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    step = Step(tf.Variable(1.0), lambda divisor: divisor, share_in_loss=trains_by_keras(model))
    found = probe(model, data, step)
    after = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    return found


@pytest.mark.parametrize("name", AS_MEAN)
def test_means_over_examples(name: str) -> None:
    found = verdict(AS_MEAN[name]())
    assert found.as_mean, found


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_masked_losses(reduction: str) -> None:
    found = verdict(tagger(reduction=reduction), WORDS, TAGS)
    assert found.as_mean, found


@pytest.mark.parametrize("name", AS_SUM)
def test_sums_over_examples(name: str) -> None:
    found = verdict(AS_SUM[name]())
    assert found.as_mean is False and found.as_sum, found


@pytest.mark.parametrize("name", NEITHER)
def test_what_needs_the_whole_batch(name: str) -> None:
    found = verdict(NEITHER[name]())
    assert found.as_mean is False and not found.as_sum, found
    assert found.worst and found.gap > 0.05


class Places(layers.Layer):
    """Embeddings of words, of positions for a batch, and of positions for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [layers.Embedding(9, 4) for _ in range(3)]

    def call(self, words: Any) -> Any:
        places = ops.arange(3)
        chosen = (words, places, ops.broadcast_to(places, ops.shape(words)))
        return sum(table(each) for table, each in zip(self.tables, chosen, strict=True))


def test_what_is_looked_up_once_for_a_batch() -> None:
    words = layers.Input((3,), dtype="int32")
    model = keras.Model(words, layers.Dense(2)(Places()(words)))
    found = verdict(compiled(model), WORDS, RNG.normal(size=(5, 3, 2)).astype("float32"))
    assert found.as_mean and found.once == (1,)


def test_a_counter_in_python_is_put_back() -> None:
    class Alternating(Own):
        """Counts its steps, and keeps weights of its own, where Keras sees neither."""

        def __init__(self) -> None:
            super().__init__()
            self.steps, self.module = 0, tf.Module()
            self.module.weight = tf.Variable(tf.ones((4, 2)))

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.steps += 1
            with tf.GradientTape() as tape:
                loss = self.steps * ops.mean(squares(y, self(x) + x @ self.module.weight))
            weights = [v.value for v in self.trainable_variables]
            *gradients, last = tape.gradient(loss, [*weights, self.module.weight])
            self.module.weight.assign_sub(0.1 * last)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = compiled(Alternating(), None)
    found = verdict(model)
    assert found.as_mean and len(found.averaged) == 1
    assert model.steps == 0
    np.testing.assert_array_equal(model.module.weight, np.ones((4, 2)))


def test_what_cannot_be_judged() -> None:
    random = compiled(keras.Sequential([layers.Input((4,)), Sampling(), layers.Dense(2)]))
    assert verdict(random) == Verdict(why_not=DRAWS)
    overflowing = own_step(lambda y, p: ops.mean(squares(y, p)) * np.inf)
    assert verdict(overflowing) == Verdict()
    fixed = own_step(lambda y, p: ops.mean(squares(y, ops.reshape(p, (5, 2)))))
    found = verdict(fixed)
    assert found.as_mean is None and "Error" in found.why_not


class Collecting(Own):
    """Adds up the gradients of some batches, in variables that Keras does not know of."""

    def __init__(self, reduce: Any, batches: int) -> None:
        super().__init__()
        self.reduce, self.batches = reduce, batches
        self(X)
        sums = [tf.Variable(tf.zeros(v.shape)) for v in self.trainable_variables]
        self.kept = {"sums": sums, "seen": [tf.Variable(0)]}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.reduce(squares(y, self(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.kept["sums"], gradients, strict=True):
            total.assign_add(gradient)
        seen = self.kept["seen"][0]
        tf.cond(seen.assign_add(1) % self.batches == 0, self.update, lambda: 0)
        return {"loss": loss}

    def update(self) -> int:
        self.optimizer.apply(self.kept["sums"], self.trainable_variables)
        for total in self.kept["sums"]:
            total.assign(tf.zeros_like(total))
        return 0


def test_steps_that_apply_no_gradients_at_first() -> None:
    mean, total = (compiled(Collecting(r, 3), None) for r in (ops.mean, ops.sum))
    found = verdict(mean)
    assert found.as_mean
    assert len(found.averaged) == 4 and not found.unclear
    assert verdict(total).as_mean is False
    assert verdict(compiled(Collecting(ops.mean, 100), None)).why_not == WAITS


class Growing(layers.Layer):
    """Its state grows by what `change` returns for (state, inputs)."""

    def __init__(self, change: Any, dtype: str = "float32") -> None:
        super().__init__()
        self.change, self.kind = change, dtype

    def build(self, shape: Any) -> None:
        shape = () if self.kind == "int32" else (4,)
        self.state = self.add_weight(
            shape=shape, dtype=self.kind, initializer="zeros", trainable=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.state.assign_add(self.change(self.state.value, x))
        return x


@pytest.mark.parametrize(
    "change, dtype, kind",
    [
        (lambda state, x: tf.shape(x)[0], "int32", "summed"),
        (lambda state, x: tf.reduce_sum(tf.square(x), 0), "float32", "summed"),
        (lambda state, x: 1, "int32", "neither"),
        (lambda state, x: 0.1 * (tf.reduce_mean(x, 0) - state), "float32", "averaged"),
        (lambda state, x: tf.random.normal([4]), "float32", "neither"),
        (lambda state, x: tf.zeros([4]), "float32", "neither"),
        # A decaying sum: near 0 it looks like a sum.
        (lambda state, x: 0.01 * (tf.reduce_sum(x, 0) - state), "float32", "unclear"),
        (lambda state, x: 0.1 * (tf.math.reduce_variance(x, 0) - state), "float32", "unclear"),
        (lambda state, x: tf.reduce_max(x, 0) - state, "float32", "unclear"),
    ],
)
def test_what_grows_without_a_gradient(change: Any, dtype: str, kind: str) -> None:
    growing = Growing(change, dtype)
    model = compiled(
        keras.Sequential(
            [layers.Input((4,)), growing, layers.BatchNormalization(), layers.Dense(2)]
        )
    )
    found = verdict(model, X, Y)
    place = next(p for p, v in enumerate(state_of(model)) if v is growing.state.value)
    for each in ("summed", "averaged", "unclear"):
        assert getattr(found, each) == ((place,) if kind == each else ()), each
    assert not np.any(growing.state.numpy())


def test_what_differs_by_nature_is_named() -> None:
    def said(*inner: Any) -> str | None:
        model = keras.Sequential([layers.Input((6, 6, 1)), *inner])
        model(np.zeros((2, 6, 6, 1)))
        return batch_dependence.warning_by_nature(model)

    assert said(layers.Dense(2), layers.Dropout(0.0), SyncBatchNormalization()) is None
    assert said(layers.TimeDistributed(layers.LSTM(2)), layers.GRU(2)) is None
    frozen = layers.BatchNormalization(trainable=False)
    assert said(frozen) is None
    found = said(layers.BatchNormalization(name="bn"), layers.Dropout(0.1, name="drop")) or ""
    assert (
        "because of 'bn', which" in found
        and "SyncBatchNormalization" in found
        and "'drop'" in found
    )
    random = (
        layers.GaussianNoise(0.1),
        layers.RandomFlip(),
        layers.TimeDistributed(layers.LSTM(2, dropout=0.1)),
    )
    assert all(said(layer) for layer in random)


def test_a_teacher_that_follows_and_is_not_trained() -> None:
    class Following(Own):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = layers.Dense(2, trainable=False)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(squares(y, self(x)) + squares(self.teacher(self.one(x)), y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for follows, leads in zip(self.teacher.weights, self.two.weights, strict=True):
                follows.assign(0.9 * follows + 0.1 * leads)
            return {"loss": loss}

        def call(self, x: Any) -> Any:
            return self.two(self.one(x)) + 0.0 * self.teacher(self.one(x))

    found = verdict(compiled(Following(), None))
    assert found.as_mean and not found.averaged and not found.unclear


@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda g: 0.1 * g, "averaged"),
        (lambda g: 1e-5 * g, "averaged"),
        (lambda g: tf.cast(tf.shape(X)[0], "float32") * g, "averaged"),
        (lambda g: g / tf.norm(g), "unclear"),
        (lambda g: 0 * g + 0.1, "none"),
    ],
)
def test_weights_that_a_step_assigns_to(change: Any, kind: str) -> None:
    class ByHand(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(squares(y, self(x)))
            weights = self.trainable_variables
            for gradient, weight in zip(tape.gradient(loss, weights), weights, strict=True):
                weight.assign_sub(change(gradient))
            return {"loss": loss}

    model = compiled(ByHand(), None)
    found = verdict(model)
    places = tuple(range(len(model.trainable_variables)))
    for each in ("summed", "averaged", "unclear"):
        assert getattr(found, each) == (places if kind == each else ()), each


class Untracked(layers.Layer):
    """Counts examples in a tf.Variable, of which Keras does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = tf.Variable(0)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(tf.shape(x)[0])
        return x


def test_what_keras_does_not_track() -> None:
    counting = Untracked()
    model = compiled(keras.Sequential([layers.Input((4,)), counting, layers.Dense(2)]))
    assert verdict(model).summed == (0,)
    assert state_of(model)[0] is counting.seen
    assert any(v is counting.seen for v in shared_state(model))
    assert int(counting.seen) == 0
