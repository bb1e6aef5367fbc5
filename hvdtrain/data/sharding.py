"""A point in a tf.data pipeline after which each rank processes only its own examples.

Before the point every rank reads the same stream, so that all know which global batch each example belongs to. The
expensive work after it (decoding, augmentation) is done by each rank for its own share. The point collects the examples
of a global batch, and lets pass those of the rank that a variable names. It records their number in a table, which
gives the length of the last, smaller batch, and their fingerprint, by which ranks notice that they read different
streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.data.tf_data_graph import POINT, batched_by_pipeline
from hvdtrain.errors import UsageError


class Window(NamedTuple):
    """The examples of one global batch that arrived at a shard point.

    Attributes:
        global_examples: Number of examples that arrived.
        begin: First of them that passed, from 0.
        end: Index after the last one that passed.
        examples: Number of those that passed and count; 0 if the rank is idle.
        checksum: Fingerprint of all that arrived.
    """

    global_examples: int
    begin: int
    end: int
    examples: int
    checksum: int


@dataclass
class ShardPoint:
    """A shard point, and the variables that its TensorFlow functions read and write.

    Attributes:
        length: Number of examples in a pass before the point; negative as in Dataset.cardinality if unknown or
            infinite.
        reader: tf.Variable, int64, shape (3,): rank, number of workers, global batch size.
        windows: TensorFlow hash table, step -> `Window`, of the steps of this pass not yet read.
        is_read: Whether a pass is being read.
    """

    length: int
    reader: Any
    windows: Any
    is_read: bool = False

    @contextmanager
    def read_as(self, rank: int, workers: int, batch: int) -> Iterator[None]:
        """Let only this rank's share of each global batch pass, in this block; outside of it, all examples.

        Args:
            rank: Index of the reading process.
            workers: Number of reading processes.
            batch: Number of examples in a global batch.

        Raises:
            UsageError: If another pass is being read.
        """
        if self.is_read:
            raise UsageError(
                "one hvdtrain.data.shard is read by two iterators at once, for instance because "
                "training and validation data come from the same Dataset: apply shard to each of "
                "them."
            )
        self.is_read = True
        self._reset(rank, workers, batch)
        try:
            yield
        finally:
            self.is_read = False
            self._reset(0, 1, 1)

    def window(self, step: int) -> Window | None:
        """Return the window of a step; None if no example arrived for it."""
        found = Window(*self.windows.lookup(_key(step)).numpy()[0].tolist())
        return found if found.global_examples else None

    def forget(self, step: int) -> None:
        self.windows.remove(_key(step))

    def _reset(self, *reader: int) -> None:
        import tensorflow as tf

        # An abandoned pass ends when it is garbage-collected, maybe while a function is being traced. There these
        # operations would become part of the trace, and wait for a lock that this thread holds.
        with tf.init_scope():
            self.windows.remove(self.windows.export()[0])
            self.reader.assign(reader)


def _key(step: int) -> Any:
    import tensorflow as tf

    return tf.constant([step], tf.int64)


def shard(dataset: Any) -> Any:
    """Let each rank process only its own examples from here on: `dataset.apply(hvdtrain.data.shard)`.

        images = tf.data.Dataset.list_files("*.png", seed=1).apply(hvdtrain.data.shard).map(decode, 4).batch(64)
        trainer.fit(images)

    Each rank of the Trainer then calls `decode` only for its own examples, and trains on the same global batches as
    one worker. Place it after shuffling (with a seed), filtering, repeating and caching, and before the expensive map;
    only map, batch, unbatch and prefetch may follow. Random numbers drawn after it differ between ranks. Outside a
    Trainer it has no effect.

    Args:
        dataset: A tf.data.Dataset of single examples.

    Raises:
        UsageError: If `dataset` is no tf.data.Dataset of single examples. When a Trainer reads the data: if any other
            operation follows.
    """
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(
            f"hvdtrain.data.shard: expected a tf.data.Dataset, not {type(dataset).__name__}"
        )
    if batched_by_pipeline(dataset):
        raise UsageError(
            "hvdtrain.data.shard divides examples, but the elements of this tf.data.Dataset are "
            "batches: put it before .batch()."
        )
    point = _make_point(dataset)

    def own(_: Any, window: Any) -> Any:
        rank, workers, batch = tf.unstack(point.reader.read_value())
        first, count, mark = window.reduce(
            (tf.constant(-1, tf.int64), tf.constant(0, tf.int64), tf.constant(0, tf.int64)),
            lambda state, item: (
                tf.where(state[0] < 0, item[0], state[0]),
                state[1] + 1,
                31 * state[2] + fingerprint(item[1]),
            ),
        )
        begin, end = rank * count // workers, (rank + 1) * count // workers
        examples = end - begin
        # As in `find_share`: an idle rank gets the batch's first example.
        begin, end = tf.where(examples > 0, begin, 0), tf.where(examples > 0, end, 1)
        found = tf.stack([count, begin, end, examples, mark])
        with tf.control_dependencies([point.windows.insert([first // batch], [found])]):
            begin, end = tf.identity(begin), tf.identity(end)
        return window.skip(begin).take(end - begin).map(lambda _, element: element)

    sharded = dataset.enumerate().group_by_window(
        key_func=lambda number, _: tf.constant(0, tf.int64),
        reduce_func=own,
        window_size_func=lambda _: point.reader.read_value()[2],
    )
    setattr(sharded, POINT, point)
    return sharded


def _make_point(dataset: Any) -> ShardPoint:
    import tensorflow as tf

    with tf.device("CPU:0"):
        return ShardPoint(
            length=int(dataset.cardinality()),
            reader=tf.Variable([0, 1, 1], dtype=tf.int64, trainable=False),
            windows=tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.int64, default_value=[0] * len(Window._fields)
            ),
        )


def fingerprint(element: Any) -> Any:
    """Return an int64 scalar tensor that identifies `element`, computed from all of its bytes."""
    import tensorflow as tf

    value = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(element, expand_composites=True):
        is_text = leaf.dtype == tf.string
        text = tf.strings.reduce_join(leaf) if is_text else tf.io.serialize_tensor(leaf)
        value = 31 * value + tf.strings.to_hash_bucket_fast(text, 2**62)
    return value
