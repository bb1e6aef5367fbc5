"""Predictions of ranks, which are threads here, against plain Keras's predict with the whole batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.data import make_source
from hvdtrain.strategies.gather import gather_predictions

WORDS = ["", "a", "bc", "déf"]
LENGTHS = [2, 3, 1, 3, 3, 5, 2]


def predictions(model, data, size):
    def on_rank(ranks):
        source = make_source(data, global_batch_size=4, shuffle=False, seed=0)
        shares = source.epoch(0, ranks.rank(), size)
        return gather_predictions(((s, model.predict_step(s.data)) for s in shares), ranks)

    return run_ranks(thread_ranks(size), on_rank)


class Outputs(keras.Model):
    """Outputs of every kind: as long as the input, of fixed length, strings, bfloat16."""

    def call(self, x):
        words = tf.gather(WORDS, tf.cast(x[:, 0], tf.int32) % len(WORDS))
        long = tf.stack([x, 2 * x], axis=-1)
        half = tf.cast(tf.reduce_sum(x, axis=1), tf.bfloat16)
        return {
            "long": long,
            "words": words,
            "half": [half, half > 3],
            "square": x[:, :, None] * x[:, None, :],
        }


def padded():
    return tf.data.Dataset.from_generator(
        lambda: (np.full(n, i + 1, "float32") for i, n in enumerate(LENGTHS)),
        output_signature=tf.TensorSpec((None,), tf.float32),
    )


@pytest.mark.filterwarnings("ignore:The examples of")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "data",
    [
        padded().padded_batch(3),
        tf.data.Dataset.range(9).map(lambda i: tf.cast([i, 1], "float32")).batch(4),
    ],
    ids=["lengths", "alike"],
)
def test_what_keras_predicts(data, size):
    model = Outputs()
    expected = model.predict(data, verbose=0)
    for found in predictions(model, data, size):
        keras.tree.assert_same_structure(found, expected)
        for name in ("long", "square", "words"):
            same(found[name], expected[name])
        for ours, theirs in zip(found["half"], expected["half"], strict=True):
            same(ours, theirs)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    if isinstance(theirs, tf.RaggedTensor):
        assert ours.shape.as_list() == theirs.shape.as_list()
        ours, theirs = ours.to_list(), theirs.to_list()
        assert ours == theirs
    else:
        np.testing.assert_array_equal(ours, theirs)
