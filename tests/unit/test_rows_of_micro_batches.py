"""Rows of tables that micro-batches look up, against plain Keras with whole batches. No ranks.

Plain Keras has a slice for each row that is looked up, and Adagrad squares slices one by one: a row looked up once for
a batch has one slice, which is a sum over the examples; a row looked up for each example has as many.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import hvdtrain

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 6, (10, 3))
Y = RNG.normal(size=(10, 1)).astype("float32")
PAIRS = np.array([[1, 2, 3], [0, 1, 2], [3, 0, 1]])


class Places(layers.Layer):
    """Adds rows for the places of a sentence."""

    def __init__(self, kind: str) -> None:
        super().__init__(name="places")
        self.kind = kind
        self.table = layers.Embedding(4, 2)
        self.table.build()

    def call(self, x: Any) -> Any:
        if self.kind == "pairs":
            return x + ops.sum(self.table(PAIRS), axis=0)
        places = ops.arange(3)
        if self.kind == "of each example":
            places = ops.broadcast_to(places, ops.shape(x)[:2])
        return x + self.table(places)


def model(kind: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    words = layers.Input((3,), dtype="int32", name="words")
    given = layers.Input((3,), dtype="int32", name="places")
    x = layers.Embedding(6, 2)(words)
    x = layers.Add()([x, layers.Embedding(3, 2)(given)]) if kind == "given" else Places(kind)(x)
    out = layers.Dense(1)(layers.Flatten()(x))
    inputs = {"words": words, "places": given} if kind == "given" else {"words": words}
    return keras.Model(inputs, out)


@pytest.mark.parametrize("kind", ["given", "of a batch", "pairs", "of each example"])
@pytest.mark.parametrize("count", [2, 4])
def test_weights_are_those_of_plain_keras(kind: str, count: int) -> None:
    """With 4 micro-batches, each is one example."""
    hvdtrain.init()
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    x = {"words": WORDS, "places": np.tile(np.arange(3), (10, 1))}
    x = x if kind == "given" else {"words": WORDS}
    plain = model(kind)
    plain.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    plain.fit(x, Y, batch_size=4, **options)
    layout = hvdtrain.Layout(hvdtrain.Mesh(), micro_batches=count)
    trainer = hvdtrain.Trainer(
        model(kind), keras.optimizers.Adagrad(0.1), "mse", global_batch_size=4, layout=layout
    )
    trainer.fit(x, Y, **options)
    for mine, wanted in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


def test_sequential_words_take_one_compiled_update() -> None:
    hvdtrain.init()
    net = keras.Sequential(
        [layers.Input((), dtype="int32"), layers.Embedding(48, 2), layers.Dense(1)]
    )
    layout = hvdtrain.Layout(hvdtrain.Mesh(), micro_batches=2)
    trainer = hvdtrain.Trainer(net, "adam", "mse", global_batch_size=8, layout=layout)
    trainer.fit(np.arange(48), np.ones((48, 1)), shuffle=False, verbose=0)
    functions: Any = trainer.steps._passes._functions  # type: ignore[union-attr]
    assert sum(key[0] == "apply" for key in functions) == 1
