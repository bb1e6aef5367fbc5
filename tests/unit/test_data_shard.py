"""A shard point in a tf.data pipeline: the same global batches, of which each rank maps its own examples only."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_arrays import order, read
from test_data_streams import OnRanks, assert_same, slices, stream

from hvdtrain.data import shard
from hvdtrain.errors import UsageError


def plain(n, upstream=lambda dataset: dataset):
    return upstream(slices(n).shuffle(n, seed=4)).map(lambda x, y: (2 * x, y))


def sharded(n, batch=None, upstream=lambda dataset: dataset, seen=None):
    """Shuffled numbers, doubled after the point."""

    def double(x, y):
        if seen is not None:
            (y,) = tf.py_function(lambda y: seen.append(int(y)) or y, [y], [tf.int64])
            y.set_shape([])
        return 2 * x, y

    dataset = upstream(slices(n).shuffle(n, seed=4)).apply(shard).map(double, 2)
    return dataset if batch is None else dataset.batch(batch).prefetch(1)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    n=st.integers(1, 40),
    cut=st.one_of(st.none(), st.integers(1, 9)),
    batch=st.integers(1, 12),
    known=st.booleans(),
    steps=st.one_of(st.none(), st.integers(1, 4)),
    data=st.data(),
)
def test_the_global_batches_without_a_point(n, cut, batch, known, steps, data):
    size = data.draw(st.integers(1, min(batch, 8)))

    def upstream(dataset):
        return dataset if known else dataset.filter(lambda x, y: True)

    options = {"batch": batch, "steps_per_epoch": steps}
    ranks = OnRanks([stream(sharded(n, cut, upstream), **options) for _ in range(size)])
    for epoch in (0, 1):
        expected = stream(plain(n, upstream), **options)
        # Each pass shuffles anew.
        want = [read(expected, e) for e in range(epoch + 1)][epoch]
        assert_same(read(ranks, epoch, size), want)


def test_each_rank_maps_its_own_examples():
    seen = [[], []]
    sources = [stream(sharded(35, seen=one)) for one in seen]
    assert order(read(OnRanks(sources), 0, 2)) == order(read(stream(plain(35))))
    assert sorted(seen[0] + seen[1]) == list(range(35))
    assert abs(len(seen[0]) - len(seen[1])) <= 5  # Five batches.


def test_ranks_notice_other_streams():
    def checksums(seed):
        data = slices(40).shuffle(40, seed=seed).apply(shard).map(lambda x, y: (x, y))
        return [share.checksum for share in stream(data).epoch(0, 0, 2)]

    assert checksums(1) == checksums(1)
    assert all(a != b for a, b in zip(checksums(1), checksums(2), strict=True))


def test_lengths_and_elements():
    data = stream(sharded(35))
    assert (data.steps_per_epoch, data.examples) == (5, 35)
    words = tf.data.Dataset.from_tensor_slices({"a": ["x", "yy", "z"], "b": [1, 2, 3]})
    two = [stream(words.apply(shard)) for _ in range(2)]
    shares = [next(one.epoch(0, rank, 2)).data for rank, one in enumerate(two)]
    assert [share["a"].tolist() for share in shares] == [[b"x"], [b"yy", b"z"]]


def test_outside_a_trainer_all_passes():
    dataset = sharded(20)
    list(stream(dataset).epoch(0, 0, 2))
    assert sorted(y.numpy() for _, y in dataset) == list(range(20))


def test_a_pass_may_be_given_up_while_a_function_is_traced():
    dataset = sharded(20)
    reading = stream(dataset).epoch(0, 0, 2)
    next(reading)

    @tf.function(autograph=False)
    def traced():
        reading.close()  # As garbage collection does.
        return tf.constant(1)

    graph = traced.get_concrete_function().graph
    assert {op.type for op in graph.get_operations()} <= {"Const", "Identity", "NoOp"}
    assert sorted(y.numpy() for _, y in dataset) == list(range(20))


def test_one_point_is_not_read_twice_at_once():
    dataset = sharded(20)
    training = stream(dataset, steps_per_epoch=1)
    list(training.epoch(0, 0, 2))  # In the middle of the pass.
    with pytest.raises(UsageError, match=r"one hvdtrain.data.shard is read by two iterators"):
        list(stream(dataset).epoch(0, 0, 2))
    list(training.epoch(0, 0, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: shard(np.ones(3)), "expected a tf.data.Dataset, not ndarray"),
        (lambda d: d.batch(4).apply(shard), r"are batches: put it before .batch\(\)"),
        (lambda d: d.apply(shard).shuffle(4).batch(4), "Shuffle comes after hvdtrain.data.shard"),
        (lambda d: d.apply(shard).filter(lambda x, y: True), "Filter comes after"),
        (lambda d: d.apply(shard).repeat(), "Repeat comes after"),
        (lambda d: d.apply(shard).cache(), "Cache comes after"),
        (lambda d: d.apply(shard).enumerate(), "Zip comes after"),
        (lambda d: d.apply(shard).batch(4, drop_remainder=True), "drop_remainder=True comes after"),
        (lambda d: d.repeat().apply(shard), "never ends: pass steps_per_epoch"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(UsageError, match=message):
        stream(make(slices(12)))


def test_repeat_before_it_goes_on_across_epochs():
    endless = [
        stream(
            slices(10).repeat().apply(shard).map(lambda x, y: (x, y)), steps_per_epoch=3, batch=4
        )
        for _ in range(2)
    ]
    seen = [order(read(OnRanks(endless), epoch, 2)) for epoch in range(3)]
    assert np.concatenate(seen).tolist() == [i % 10 for i in range(36)]
