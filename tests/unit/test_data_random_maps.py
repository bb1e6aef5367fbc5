"""Datasets whose maps draw random numbers: the ranks draw what Keras draws."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_data_arrays import read
from test_data_streams import OnRanks, slices, stream


def noisy(data):
    layer = keras.layers.GaussianNoise(1.0, seed=3)
    return data.map(lambda x, y: (layer(x, training=True), y))


RANDOM = {
    "map": lambda data: data.map(lambda x, y: (x + tf.random.uniform([1]), y)),
    "stateless": lambda data: tf.data.Dataset.zip(
        data, tf.data.Dataset.random(seed=4).batch(2)
    ).map(
        lambda part, seed: (part[0] + tf.random.stateless_uniform([1], seed), part[1]),
        num_parallel_calls=tf.data.AUTOTUNE,
    ),
    "layer": lambda data: noisy(data.batch(5)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_maps_draw_what_they_draw_for_keras(kind):
    def make():
        keras.utils.set_random_seed(3)
        return RANDOM[kind](slices(35))

    sources = [stream(make()) for _ in range(3)]
    dataset = make() if kind == "layer" else make().batch(8)
    for epoch in range(2):
        expected = [np.concatenate(part) for part in zip(*dataset.as_numpy_iterator(), strict=True)]
        found = read(OnRanks(sources), epoch, 3)
        for ours, theirs in zip(zip(*found, strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(ours), theirs)
