"""Which slices of an embedding's gradient are sums over the batch, and which belong to one example each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.sparse import add_slices, common_indices, follows_data, sum_slices

POSITIONS = np.arange(3)


class Embedding(layers.Layer):
    """Looks up what `choose` makes of the data."""

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.choose = choose
        self.table = layers.Embedding(9, 2)
        self.table.build()
        self.fixed = tf.constant(POSITIONS)

    def call(self, words: Any) -> Any:
        return self.table(self.choose(self, words))


BY_DATA = {
    "words": lambda _, words: words,
    "words by position": lambda _, words: words + ops.arange(3),
    "sorted words": lambda _, words: ops.sort(words),
    "random": lambda _, words: tf.random.uniform([3], maxval=9, dtype=tf.int32),
    "of a call": lambda _, words: tf.function(lambda x: x + 1, autograph=False)(words),
}
BY_POSITION = {
    "range": lambda _, words: ops.arange(3),
    "range of the shape": lambda _, words: ops.arange(ops.shape(words)[-1]),
    "range of an unknown shape": lambda _, words: tf.range(tf.shape(words)[-1]),
    "constant": lambda _, words: POSITIONS,
    "constant of the layer": lambda layer, words: layer.fixed,
    "of a call": lambda _, words: tf.function(lambda: tf.range(3), autograph=False)(),
}


def indices_follow_data(choose: Callable[[Any, Any], Any]) -> bool:
    layer = Embedding(choose)
    found = []

    @tf.function(autograph=False)
    def step(words: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(words))
        (slices,) = tape.gradient(loss, [layer.table.trainable_variables[0].value])
        found.append(follows_data(slices.indices))
        return loss

    step(tf.zeros([4, 3], tf.int32))
    return found[0]


@pytest.mark.parametrize("name", BY_DATA)
def test_lookups_by_the_data(name: str) -> None:
    assert indices_follow_data(BY_DATA[name])


@pytest.mark.parametrize("name", BY_POSITION)
def test_lookups_once_for_a_batch(name: str) -> None:
    assert not indices_follow_data(BY_POSITION[name])


def slices_of_two(
    choose: Callable[[Any, Any], Any], rows: int | None, once: bool | None, branch: bool = False
) -> list[int]:
    """How many slices two ranks have in all, each with 4 rows of 3 words, in a graph for `rows` rows.

    With `branch`, they are added up in a branch of the graph, as loss scaling does it.
    """

    def run(ranks: Communicator) -> int:
        layer = Embedding(choose)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([rows, 3], tf.int32)])
        def step(words: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(words))
            (slices,) = tape.gradient(loss, [layer.table.trainable_variables[0].value])
            indices = lambda: sum_slices(slices, ranks, "test", once).indices  # noqa: E731
            return tf.cond(loss < np.inf, indices, lambda: slices.indices) if branch else indices()

        return int(tf.size(step(tf.zeros([4, 3], tf.int32))))

    return run_ranks(thread_ranks(2), run)


def per_example(_: Any, words: Any) -> Any:
    return ops.broadcast_to(ops.arange(3), ops.shape(words))


PAIRS = np.array([[1, 2, 3], [0, 1, 2], [0, 0, 1]])
"""Relative positions of three words: looked up once, and some of them several times."""


def test_how_often_positions_are_looked_up() -> None:
    by_batch = BY_POSITION["range"]
    # A graph for any batch shows it; in one for this batch alone the indices do.
    for rows in (None, 4):
        assert slices_of_two(by_batch, rows, None) == [3, 3]
        assert slices_of_two(lambda _, words: PAIRS, rows, None) == [9, 9]
        assert slices_of_two(per_example, rows, None) == [24, 24]
        assert slices_of_two(by_batch, rows, None, branch=True) == [3, 3]
        assert slices_of_two(per_example, rows, None, branch=True) == [24, 24]
        assert slices_of_two(BY_DATA["words"], rows, None) == [24, 24]
    assert slices_of_two(by_batch, 4, True) == [3, 3]
    assert slices_of_two(per_example, 4, False) == [24, 24]


def of_one_process(choose: Callable[[Any, Any], Any], words: Any) -> tuple[list[int], Any]:
    """The slices of plain TensorFlow for the whole batch: their indices and values."""
    layer = Embedding(choose)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(words) * tf.cast(words, tf.float32)[..., tf.newaxis])
    (slices,) = tape.gradient(loss, [layer.table.trainable_variables[0].value])
    return slices.indices.numpy().tolist(), slices.values.numpy()


@pytest.mark.parametrize("choose", [BY_POSITION["range of an unknown shape"], per_example])
@pytest.mark.parametrize("read", [False, True], ids=["given", "read in the graph"])
@pytest.mark.parametrize("shares", [(4, 4), (5, 3), (5, 4), (2, 1)])
@pytest.mark.parametrize("known", [(True, True), (True, False), (False, False)])
def test_positions_of_shares_and_graphs_of_any_kind(
    choose: Any, read: bool, shares: tuple[int, int], known: tuple[bool, bool]
) -> None:
    """As one process has them, whether or not a rank's graph, or a part of it, knows the size of the batch."""
    whole = tf.random.stateless_uniform([sum(shares), 3], [1, 2], 0, 9, tf.int32)
    parts = tf.split(whole, shares)

    def run(ranks: Communicator) -> tuple[list[int], Any]:
        layer = Embedding(choose)
        mine = parts[ranks.rank()]
        shape = mine.shape if known[ranks.rank()] else tf.TensorShape([None, None])

        def step(words: tf.Tensor) -> Any:
            words = next(words) if read else words
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(words) * tf.cast(words, tf.float32)[..., tf.newaxis])
            (slices,) = tape.gradient(loss, [layer.table.trainable_variables[0].value])
            total = sum_slices(slices, ranks, "test")
            return total.indices, total.values

        element = tf.TensorSpec(shape, tf.int32)
        data = tf.data.Dataset.from_generator(lambda: iter([mine]), output_signature=element)
        given = [] if read else [element]
        function = tf.function(step, autograph=False, input_signature=given or None)
        indices, values = function(iter(data) if read else mine)
        return indices.numpy().tolist(), values.numpy()

    indices, values = of_one_process(choose, whole)
    for found in run_ranks(thread_ranks(2), run):
        assert found[0] == indices
        np.testing.assert_allclose(found[1], values, rtol=1e-6)  # sums in another order


def test_a_step_that_several_functions_call() -> None:
    """It is traced once for texts of any length, within the first of them, and also called alone."""

    def run(ranks: Communicator) -> list[int]:
        layer = Embedding(BY_POSITION["range of an unknown shape"])

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None], tf.int32)])
        def step(words: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(words))
            (slices,) = tape.gradient(loss, [layer.table.trainable_variables[0].value])
            return tf.size(sum_slices(slices, ranks, "test").indices)

        signature = [tf.TensorSpec([None, None], tf.int32)]
        first, second = (
            tf.function(lambda words: step(words) + 0, autograph=False, input_signature=signature)
            for _ in range(2)
        )
        words = tf.zeros([4, 3], tf.int32)
        return [int(one(words)) for one in (first, second, step, first)]

    assert run_ranks(thread_ranks(2), run) == [[3] * 4] * 2


def test_constants_that_differ_between_ranks_are_no_positions() -> None:
    """A table with a row for each rank, for example: rank 0 has a gradient of 1 for row 0, rank 1 of 2 for row 1."""

    def run(ranks: Communicator) -> list[float]:
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None])])
        def step(x: tf.Tensor) -> tf.Tensor:
            values = tf.ones([1, 1]) * tf.reduce_sum(x)
            slices = tf.IndexedSlices(values, tf.constant([ranks.rank()]), tf.constant([2, 1]))
            total = sum_slices(slices, ranks, "test")
            return tf.math.unsorted_segment_sum(total.values, total.indices, 2)[:, 0]

        return list(step(tf.ones([1 + ranks.rank()])).numpy())

    assert run_ranks(thread_ranks(2), run) == [[1.0, 2.0]] * 2


def summed(indices: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Slices of 1, 2, 3 ... on each rank, summed eagerly."""

    def run(ranks: Communicator) -> tuple[list[int], list[float]]:
        mine = indices[ranks.rank()]
        values = tf.range(1.0, len(mine) + 1.0)[:, tf.newaxis]
        places = tf.constant(mine, tf.int32)
        total = sum_slices(tf.IndexedSlices(values, places, [9, 1]), ranks, "test")
        return total.indices.numpy().tolist(), total.values.numpy().ravel().tolist()

    return run_ranks(thread_ranks(len(indices)), run)


def test_eager_slices() -> None:
    # A run of positions is one lookup for all; anything else is looked up by the data.
    assert summed([[0, 1, 2]] * 2) == [([0, 1, 2], [2.0, 4.0, 6.0])] * 2
    assert summed([[0, 2], [0, 2]]) == [([0, 2, 0, 2], [1.0, 2.0, 1.0, 2.0])] * 2
    assert summed([[0, 1], [1, 2]]) == [([0, 1, 1, 2], [1.0, 2.0, 1.0, 2.0])] * 2
    assert summed([[3], [3]]) == [([3, 3], [1.0, 1.0])] * 2
    assert summed([[0, 1, 0], [1]]) == [([0, 1, 0, 1], [1.0, 2.0, 3.0, 1.0])] * 2
    assert summed([[0, 1, 0, 1], []]) == [([0, 1, 0, 1], [1.0, 2.0, 3.0, 4.0])] * 2
    assert summed([[0, 1, 2], [0]]) == [([0, 1, 2, 0], [1.0, 2.0, 3.0, 1.0])] * 2


def slices_at(indices: list[int]) -> tf.IndexedSlices:
    values = tf.range(1.0, len(indices) + 1.0)[:, tf.newaxis]
    return tf.IndexedSlices(values, tf.constant(indices), [9, 1])


@pytest.mark.parametrize(
    "one, other, once, indices, values",
    [
        ([2, 3, 4], [2, 3, 4], True, [2, 3, 4], [2, 4, 6]),
        ([5, 2, 5], [5, 2, 5], True, [5, 2, 5], [2, 4, 6]),
        # Each part is one example, which has all of its positions.
        ([2, 3], [2, 3], False, [2, 3, 2, 3], [1, 2, 1, 2]),
        ([2, 4], [2, 4], False, [2, 4, 2, 4], [1, 2, 1, 2]),
        ([2, 3], [3, 4], False, [2, 3, 3, 4], [1, 2, 1, 2]),
        ([5], [5], False, [5, 5], [1, 1]),
    ],
)
def test_slices_of_two_parts(one: Any, other: Any, once: bool, indices: Any, values: Any) -> None:
    total = add_slices(slices_at(one), slices_at(other), once)
    assert total.indices.numpy().tolist() == indices
    assert total.values.numpy().ravel().tolist() == values


def test_indices_that_all_ranks_have() -> None:
    """Of four tables: all ranks look up the same rows, other rows, the same pairs, the same rows but for one."""
    mine = [[[0, 1, 2], [0, 1], [2, 0, 2], [4, 5]], [[0, 1, 2], [1, 2], [2, 0, 2], [4, 5, 6]]]

    def run(ranks: Communicator) -> Any:
        slices = {10 + n: slices_at(each) for n, each in enumerate(mine[ranks.rank()])}
        return common_indices(slices, ranks)

    assert run_ranks(thread_ranks(2), run) == [{10: (0, 1, 2), 12: (2, 0, 2)}] * 2
