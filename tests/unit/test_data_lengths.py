"""Batches whose examples differ in length: the user's own batches are the global batches."""

import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_data_streams import OnRanks, stream

from hvdtrain.data import Spec
from hvdtrain.data.structures import concatenate
from hvdtrain.errors import UsageError

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def sequences():
    signature = tf.TensorSpec((None,), tf.float32), tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(
        lambda: ((np.full(n, i, "float32"), i) for i, n in enumerate(LENGTHS)),
        output_signature=signature,
    )


def ready(dataset):
    return [tuple(part.numpy() for part in batch) for batch in dataset]


class Items(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    @property
    def num_batches(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


PADDED = sequences().padded_batch(4)
BUCKETS = sequences().bucket_by_sequence_length(lambda x, _: tf.shape(x)[0], [3, 5], [3, 4, 2])
KINDS = {
    "padded": lambda dataset: dataset,
    "generator": lambda dataset: iter(ready(dataset)),
    "function": lambda dataset: partial(iter, ready(dataset)),
    "PyDataset": lambda dataset: Items(ready(dataset)),
}


@pytest.mark.filterwarnings("ignore:The examples of")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", [PADDED, BUCKETS], ids=["padded_batch", "buckets"])
def test_each_batch_is_a_global_batch(dataset, kind, size):
    sources = [stream(KINDS[kind](dataset), batch=4) for _ in range(size)]
    assert sources[0].element == (Spec((None,), "float32"), Spec((), "int64"))
    ranks = [list(OnRanks(sources).epoch(0, rank, size)) for rank in range(size)]
    for expected, shares in zip(ready(dataset), zip(*ranks, strict=True), strict=True):
        assert {share.global_examples for share in shares} == {len(expected[1])}
        assert len({share.checksum for share in shares}) == 1
        joined = concatenate([share.data for share in shares if share.examples])
        for ours, theirs in zip(joined, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_batch_of_another_size_is_said_or_refused():
    with pytest.warns(UserWarning, match="used as it is.*4 examples, not global_batch_size 8"):
        list(stream(PADDED).epoch(0, 0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(stream(PADDED, batch=4).epoch(0, 0, 1))  # The tail has 3.
    with pytest.raises(UsageError, match="has 4 examples, more than global_batch_size 3"):
        next(stream(PADDED, batch=3).epoch(0, 0, 1))


def test_lengths_that_begin_to_differ_late_are_an_error():
    batches = [np.zeros((4, n), "float32") for n in (2, 2, 3)]
    with pytest.raises(UsageError, match=r"differ: one has .*2.*3.*first two batches differ"):
        list(stream(iter(batches), batch=12).epoch(0, 0, 1))


def test_data_comes_as_keras_hands_it_to_a_train_step():
    """Against Keras's own adapters: x alone, (x,), pairs of inputs, triplets, dicts."""
    x = np.arange(24, dtype="float32").reshape(12, 2)
    slices = tf.data.Dataset.from_tensor_slices
    cases = {
        "array": x,
        "list": [x, x],
        "dict": {"a": x},
        "dataset": slices(x).batch(4),
        "one": slices((x,)).batch(4),
        "one dict": slices({"a": x, "b": x}).batch(4),
        "triplet": slices((x, x, x)).batch(4),
        "nested triplet": slices(((x, x, x),)).batch(4),
        "four": slices((x, x, x, x)).batch(4),
        "siamese": slices(((x, x), np.arange(12))).batch(4),
        "generator": ((x[i : i + 4],) for i in (0, 4, 8)),
        "py arrays": Items([x[:4], x[4:8], x[8:]]),
        "py dicts": Items([{"a": x[:4]}, {"a": x[4:8]}, {"a": x[8:]}]),
    }
    for name, data in cases.items():
        given = data if name != "generator" else list(data)
        source = stream(iter(given) if name == "generator" else data, batch=4)
        shares = [share.data for share in source.epoch(0, 0, 1)]
        for ours, theirs in zip(shares, keras_batches(given), strict=True):
            ours = keras.tree.lists_to_tuples(ours)  # As Keras does with lists of arrays.
            keras.tree.assert_same_structure(ours, theirs)
            for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
        keras.tree.assert_same_structure(
            keras.tree.map_structure(lambda _: 0, shares[0]), no_specs(source.element)
        )


def keras_batches(data):
    """What plain Keras hands to train_step."""
    seen = []

    class Model(keras.Model):
        def train_step(self, data):
            seen.append(keras.tree.map_structure(lambda leaf: leaf.numpy(), data))
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile(run_eagerly=True)
    if isinstance(data, list) and isinstance(data[0], tuple):
        data = (batch for batch in data)
    options = {"batch_size": 4} if isinstance(data, np.ndarray | list | dict) else {}
    model.fit(data, shuffle=False, verbose=0, **options)
    return seen


def no_specs(element):
    if isinstance(element, Spec):
        return 0
    if isinstance(element, dict):
        return {key: no_specs(item) for key, item in element.items()}
    return type(element)(no_specs(item) for item in element)
