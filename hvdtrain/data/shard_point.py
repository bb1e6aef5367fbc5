"""The state of a shard point in a tf.data pipeline (see `sharding`) while the pipeline runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
