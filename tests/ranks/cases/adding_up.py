"""What parts of a batch add up to: sums, counters and target networks with idle ranks, overflow in float16."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from against_keras import BATCH, EPOCHS, SGD, TOKENS, WORDS, apart, plain, vector_model, vectors
from against_keras import Y as TAGS
from keras import layers, ops
from small import weights

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError

X, Y = vectors()
"""81 examples in batches of 16: the last batch has one, and all ranks but the last are idle."""


class Losing(keras.Model):
    """A model with a compute_loss of its own."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = vector_model()
        self.own_loss = loss

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.own_loss(y, y_pred)


def losing(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = Losing(loss)
        model.build((None, 3))
        return model

    return make


def case_sums() -> dict[str, Any]:
    """Losses whose gradients one process adds up over the examples."""
    found = {}
    for name, loss in {
        "sum": lambda y, p: ops.sum(ops.square(y - p)),
        "vector": lambda y, p: ops.mean(ops.square(y - p), axis=-1),
        "matrix": lambda y, p: ops.square(y - p),
    }.items():
        found[name] = apart(
            losing(loss), lambda: SGD(0.003), (X, Y), compiled=lambda: {"loss": "mse"}
        )
    found["no reduction"] = apart(
        vector_model,
        lambda: SGD(0.003),
        (X, Y),
        compiled=lambda: {"loss": keras.losses.MeanSquaredError(reduction=None)},
    )
    return found


def case_evaluated_first() -> dict[str, Any]:
    """Sums and means in a process that evaluates before it trains: then, and after the training."""
    found = {}
    for name, make, loss in [
        ("own sum", losing(lambda y, p: ops.sum(ops.square(y - p))), "mse"),
        ("own mean", losing(lambda y, p: ops.mean(ops.square(y - p))), "mse"),
        ("sum", vector_model, lambda y, p: ops.sum(ops.square(y - p))),
        ("mean", vector_model, lambda y, p: ops.mean(ops.square(y - p))),
    ]:
        wanted = plain(make, SGD(0.003), (X, Y), None, {"loss": loss}, answers=True)
        begun = plain(make, SGD(0.0), (X, Y), None, {"loss": loss}, answers=True)
        trainer = hvdtrain.Trainer(make, SGD(0.003), loss, global_batch_size=BATCH, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # About one number for a batch.
            before = trainer.evaluate(X, Y, verbose=0, return_dict=True)
            trainer.fit(X, Y, epochs=EPOCHS, shuffle=False, verbose=0)
            after = trainer.evaluate(X, Y, verbose=0, return_dict=True)
        found[name] = {
            "before": begun.apart(before, "evaluate", "relative"),
            "after": wanted.apart(after, "evaluate", "relative"),
        }
    return found


class Positions(layers.Layer):
    """Adds embeddings of each position: one that is looked up once for a batch, and one for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.each = layers.Embedding(6, 4), layers.Embedding(6, 4)

    def call(self, x: Any) -> Any:
        places = ops.arange(ops.shape(x)[1])
        return x + self.once(places) + self.each(ops.broadcast_to(places, ops.shape(x)[:2]))


def reading() -> keras.Model:
    words = layers.Input((6,), dtype="int32")
    word = Positions()(layers.Embedding(TOKENS, 4)(words))
    word = word + layers.MultiHeadAttention(2, 2)(word, word)
    return keras.Model(words, layers.Dense(5)(layers.GlobalAveragePooling1D()(word)))


def case_slices() -> dict[str, Any]:
    """Embeddings of words and of positions under optimizers that are not linear in the gradient."""
    return {
        name: apart(reading, make, (WORDS, TAGS))
        for name, make in {
            "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3),
            "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
            "clipnorm": lambda: SGD(0.1, clipnorm=1e-2),
        }.items()
    }


class Counting(layers.Layer):
    """Counts its calls and examples in training, as integers and as floats, and goes by them and a moving mean."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(
            name="calls", dtype="int32", initializer="zeros", trainable=False
        )
        self.steps = self.add_weight(name="steps", initializer="zeros", trainable=False)
        self.examples = self.add_weight(
            name="examples", dtype="int32", initializer="zeros", trainable=False
        )
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)
        self.level = self.add_weight(
            name="level", shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        scale = 1 + 1e-3 * ops.cast(self.examples, "float32")
        result = scale * (x - self.level) + 1e-3 * self.seen
        if training:
            self.calls.assign_add(1)
            self.steps.assign_add(1.0)
            self.examples.assign_add(ops.shape(x)[0])
            self.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.level.assign(0.9 * self.level + 0.1 * ops.mean(x, axis=0))
        return result


class Teacher(keras.Model):
    """A student and the moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = vector_model(), vector_model()
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        for ours, theirs in zip(self.teacher.variables, self.student.variables, strict=True):
            ours.assign(0.9 * ours + 0.1 * theirs)
        return logs


def counting() -> keras.Model:
    kernel = layers.SpectralNormalization(layers.Dense(4, activation="tanh"))
    return keras.Sequential([layers.Input((3,)), kernel, Counting(), layers.Dense(1)])


def teaching() -> keras.Model:
    model = Teacher()
    model(X[:1])
    return model


def case_state_without_gradients() -> dict[str, Any]:
    """Counters, the vectors of spectral normalization and target networks, with idle ranks."""
    mse = lambda: {"loss": "mse"}  # noqa: E731
    return {
        "counters": apart(counting, lambda: SGD(0.05), (X, Y), compiled=mse),
        "teacher": apart(teaching, lambda: SGD(0.05), (X, Y), compiled=mse),
    }


def scaled(**kwargs: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(
        SGD(0.05, **kwargs), initial_scale=2.0**17, dynamic_growth_steps=4
    )


def case_overflow() -> dict[str, Any]:
    """The loss scale begins where gradients overflow in float16 and comes to where they do not."""
    return {
        "plain": overflowing({}, {}),
        "accumulated": overflowing({"gradient_accumulation_steps": 2}, {}),
        "sharded": overflowing({}, {"shard_optimizer": True}),
    }


def overflowing(optimizer: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    from against_keras import one_process, reference  # type: ignore[attr-defined]

    def make() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return keras.Sequential(
                [layers.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1, dtype="float32")]
            )
        finally:
            keras.config.set_dtype_policy("float32")

    x, y = np.repeat(X[:1], 64, axis=0), np.repeat(Y[:1], 64, axis=0) + 30
    fit = {"epochs": 10}
    trained = hvdtrain.Trainer(
        make, scaled(**optimizer), "mse", global_batch_size=16, seed=1, **trainer
    )
    trained.fit(x, y, shuffle=False, verbose=0, **fit)

    def compute() -> dict[str, Any]:
        model, _ = one_process(make, scaled(**optimizer), (x, y), fit, {"loss": "mse"})
        return {"weights": weights(model), "optimizer": _state(model.optimizer)}

    wanted = reference(compute, (x, y, optimizer), any_size=True)
    return {
        "weights": wanted.apart(weights(trained.model), "weights"),
        "optimizer": wanted.apart(_state(trained.model.optimizer), "optimizer"),
        "iterations": int(trained.model.optimizer.iterations),
    }


def _state(optimizer: Any) -> list[Any]:
    scaling = [optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations]
    return [np.asarray(v.numpy(), "float64") for v in scaling]


def case_one_loss_for_two_trainers() -> dict[str, Any]:
    """Two Trainers that share a Loss object, used in turns."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    shared = [
        hvdtrain.Trainer(vector_model, SGD(0.003), loss, global_batch_size=16, seed=1)
        for _ in range(2)
    ]
    for trainer in [*shared, *shared]:
        trainer.fit(X, Y, epochs=1, shuffle=False, verbose=0)
    alone = hvdtrain.Trainer(
        vector_model,
        SGD(0.003),
        keras.losses.MeanSquaredError(reduction="sum"),
        global_batch_size=16,
        seed=1,
    )
    for _ in range(2):
        alone.fit(X, Y, epochs=1, shuffle=False, verbose=0)
    wanted = weights(alone.model)
    return {
        str(number): float(
            max(np.abs(a - b).max() for a, b in zip(weights(t.model), wanted, strict=True))
        )
        for number, t in enumerate(shared)
    }


class Stepping(Losing):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _contrastive(y: Any, p: Any) -> Any:
    logits = ops.matmul(p, ops.transpose(y))
    return ops.mean(
        ops.categorical_crossentropy(ops.eye(ops.shape(y)[0]), logits, from_logits=True)
    )


def case_gathered() -> dict[str, Any]:
    """A loss that compares all examples, which it gathers itself: no rank can try it alone."""

    def gathered(y: Any, p: Any) -> Any:
        return _contrastive(hvd.allgather(y), hvd.allgather(p))

    wanted = plain(losing(_contrastive), SGD(0.003), (X[:80], Y[:80]), None, {"loss": "mse"})
    trainer = hvdtrain.Trainer(losing(gathered), SGD(0.003), "mse", global_batch_size=BATCH, seed=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = trainer.fit(X[:80], Y[:80], epochs=EPOCHS, shuffle=False, verbose=0).history
    found = {
        "weights": wanted.apart(weights(trainer.model), "weights"),
        "history": wanted.apart(history, "history", "relative"),
    }
    # In a train_step, where the gradients are weighted; the ranks' shares of 5 examples differ.
    odd = {"batch_size": 5, "epochs": 1}
    wanted = plain(
        lambda: Stepping(_contrastive), SGD(0.003), (X[:80], Y[:80]), odd, {"loss": "mse"}
    )
    stepping = hvdtrain.Trainer(
        lambda: Stepping(gathered), SGD(0.003), "mse", global_batch_size=5, seed=1
    )
    stepping.fit(X[:80], Y[:80], shuffle=False, verbose=0)
    in_step = {"weights": wanted.apart(weights(stepping.model), "weights")}
    far = {"gathered": found, "in a train_step": in_step}
    return {"far": far, "told": [str(each.message) for each in told]}


def _balanced(y: Any, p: Any) -> Any:
    """Weighs the examples of a class by how many the batch has."""
    positive = ops.cast(y > 0, "float32")
    return ops.mean(ops.square(y - p) * positive / (ops.sum(positive) + 1e-3))


def case_refused() -> dict[str, str]:
    """What differs from one process, and how it is said; with probe=False it trains."""
    found = {}
    signs = np.where(np.arange(len(Y)) % 2, 1.0, -1.0).astype("float32")[:, np.newaxis]
    for name, (make, targets, batch) in {
        "contrastive": (losing(_contrastive), Y, 16),
        "sum in a step": (lambda: Stepping(lambda y, p: ops.sum(ops.square(y - p))), Y, 16),
        # Two examples on each of two ranks: one of each class, on which it is a mean.
        "few examples": (losing(_balanced), signs, 4),
    }.items():
        trainer = hvdtrain.Trainer(make, SGD(0.003), "mse", global_batch_size=batch)
        try:
            trainer.fit(X, targets, verbose=0, shuffle=False)
        except UsageError as error:
            found[name] = str(error)
    trainer = hvdtrain.Trainer(
        losing(_contrastive), SGD(0.003), "mse", global_batch_size=16, probe=False
    )
    found["trained"] = str(np.isfinite(trainer.fit(X, Y, verbose=0).history["loss"][0]))
    return found
