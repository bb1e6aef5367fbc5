"""Structured data: features of all kinds, gates, recommendation, time series."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras_io_kit import EXAMPLES as COUNT
from keras_io_kit import Example, Kit, classes, rng, vectors

USERS, ITEMS = 7, 9


def wide_and_deep(kit: Kit) -> keras.Model:
    numbers = layers.Input((4,), name="numbers")
    kind = layers.Input((1,), dtype="int32", name="kind")
    normalize = layers.Normalization(mean=0.3, variance=2.0)
    wide = layers.CategoryEncoding(5, "one_hot")(kind)
    deep = layers.Concatenate()(
        [normalize(numbers), layers.Flatten()(layers.Embedding(5, 3)(kind))]
    )
    deep = layers.ReLU()(kit.BatchNormalization()(layers.Dense(8)(deep)))
    merged = layers.Concatenate()([wide, deep])
    model = keras.Model([numbers, kind], layers.Dense(3, activation="softmax")(merged))
    model.compile(
        kit.optimizer(keras.optimizers.SGD(0.1)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


class Gate(layers.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.elu, self.out = layers.Dense(width, activation="elu"), layers.Dense(width)
        self.linear = layers.Dense(width)
        self.sigmoid = layers.Dense(width, activation="sigmoid")
        self.norm = layers.LayerNormalization()

    def call(self, inputs: Any) -> Any:
        z = self.out(self.elu(inputs))
        return self.norm(inputs + self.linear(z) * self.sigmoid(z))


def gated_residual_network(kit: Kit) -> keras.Model:
    """Weights of classes as sample weights, Adam."""
    inputs = layers.Input((6,))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(Gate(6)(Gate(6)(inputs))))
    # A large epsilon: entries whose gradient is all rounding are not moved by the whole rate.
    optimizer = kit.optimizer(keras.optimizers.Adam(0.01, epsilon=1e-2))
    auc = keras.metrics.AUC(name="auc")
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", auc])
    return model


class Recommender(keras.Model):
    """Subclassed: its first batch builds it."""

    def __init__(self) -> None:
        super().__init__()
        l2 = keras.regularizers.L2(1e-3)
        self.user = layers.Embedding(USERS, 4, embeddings_regularizer=l2)
        self.user_bias = layers.Embedding(USERS, 1)
        self.item = layers.Embedding(ITEMS, 4, embeddings_regularizer=l2)
        self.item_bias = layers.Embedding(ITEMS, 1)

    def call(self, pairs: Any) -> Any:
        user, item = pairs[:, 0], pairs[:, 1]
        dot = ops.sum(self.user(user) * self.item(item), axis=1, keepdims=True)
        return ops.sigmoid(dot + self.user_bias(user) + self.item_bias(item))


def recommender(kit: Kit) -> keras.Model:
    model = Recommender()
    model.compile(kit.optimizer(keras.optimizers.SGD(0.5)), "binary_crossentropy")
    return model


def forecast(kit: Kit) -> keras.Model:
    inputs = layers.Input((10, 2))
    z = layers.LSTM(6)(layers.Conv1D(4, 3, padding="causal", activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(z))
    optimizer = kit.optimizer(keras.optimizers.RMSprop(0.005, momentum=0.5, epsilon=1e-2))
    model.compile(optimizer, "huber", metrics=["mae"])
    return model


PAIRS = np.stack([classes(41, USERS), classes(42, ITEMS)], axis=1)
MODELS = [
    Example("wide and deep", wide_and_deep, [vectors(43, 4), classes(44, 5, 1)], classes(45, 3)),
    Example("gated residual network", gated_residual_network, vectors(46, 6), classes(47, 2, 1)),
    Example("recommender", recommender, PAIRS, rng(48).uniform(size=(COUNT, 1)).astype("float32")),
    Example("forecast", forecast, vectors(49, 20).reshape(COUNT, 10, 2), vectors(50, 3)),
]
