"""Layers that users write: losses, states and counters of their own, and some that mix the examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops


class Penalty(layers.Layer):
    """Adds a loss of its own: "mean", "sum" or "vector" over the examples."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.kind = kind

    def call(self, x: Any) -> Any:
        squares = 0.05 * ops.square(x)
        of = {"mean": ops.mean, "sum": ops.sum, "vector": lambda s: ops.mean(s, axis=-1)}
        self.add_loss(of[self.kind](squares))
        return x


class Endpoint(layers.Layer):
    """Keras's guide: the loss of the model is that of its last layer, which is given the targets."""

    def call(self, both: Any) -> Any:
        self.add_loss(ops.mean(ops.square(both["a"][:, :3] - both["b"])))
        return both["a"]


class Counter(layers.Layer):
    """Counts its calls in training: steps, or the examples it has seen."""

    def __init__(self, dtype_of_state: str = "int32", examples: bool = False) -> None:
        super().__init__()
        self.dtype_of_state, self.examples = dtype_of_state, examples

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            name="seen", dtype=self.dtype_of_state, initializer="zeros", trainable=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            more = ops.shape(x)[0] if self.examples else 1
            self.seen.assign_add(ops.cast(more, self.dtype_of_state))
        return x


class Centering(layers.Layer):
    """Takes away a moving mean of its inputs, which it keeps itself."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            name="mean", shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


class Largest(layers.Layer):
    """Scales by the largest value it has seen."""

    def build(self, shape: Any) -> None:
        self.largest = self.add_weight(name="largest", initializer="ones", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return x / self.largest


class Among(layers.Layer):
    """Every example takes away the mean of the batch."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


class BatchAttention(layers.Layer):
    """Attention from example to example."""

    def call(self, x: Any) -> Any:
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


class Noise(layers.Layer):
    """Random numbers of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        noise = keras.random.normal(ops.shape(x), seed=self.generator)
        return x + 0.1 * noise if training else x


class Positions(layers.Layer):
    """Adds an embedding of each position, looked up once for a batch, or for each example."""

    def __init__(self, once: bool = True) -> None:
        super().__init__()
        self.once, self.table = once, layers.Embedding(5, 4)

    def call(self, x: Any) -> Any:
        places = ops.arange(5)
        return x + self.table(places if self.once else ops.broadcast_to(places, ops.shape(x)[:2]))


class Vote(layers.Layer):
    """The same weights twice in a step, on the batch and on half of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(3, "tanh")

    def call(self, x: Any) -> Any:
        return self.inner(x) + self.inner(ops.flip(x, axis=-1))


def Join() -> Callable[[Any], Any]:
    """Both inputs behind each other."""
    return lambda both: layers.Concatenate()([both["a"], both["b"]])


def Heads() -> Callable[[Any], Any]:
    """Two outputs."""
    return lambda x: {
        "one": layers.Dense(2, name="one")(x),
        "other": layers.Dense(1, name="other")(x),
    }


def Twice(layer: Any) -> Callable[[Any], Any]:
    """A layer that takes its input as query, value and key."""
    return lambda x: layer(x, x)


def Both(layer: Any) -> Callable[[Any], Any]:
    """A layer that takes a list of two."""
    return lambda x: layer([x, layers.Dense(x.shape[-1])(x)])
