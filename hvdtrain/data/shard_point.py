"""What a shard point in a pipeline (see `sharding`) receives and reports while the pipeline runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError


class Window(NamedTuple):
    """The examples of one global batch as they came to a point, of which begin..end passed."""

    global_examples: int
    begin: int
    end: int
    examples: int  # of those that passed, how many count
    checksum: int


@dataclass
class ShardPoint:
    """A point, and what TensorFlow's functions read and write there.

    length: examples of a pass before the point, as Dataset.cardinality has it.
    reader: tf.Variable, int64: rank, workers, examples of a global batch.
    windows: TensorFlow's hash table from step to `Window`: those of this pass that were not yet trained.
    """

    length: int
    reader: Any
    windows: Any
    is_read: bool = False

    @contextmanager
    def read_as(self, rank: int, workers: int, batch: int) -> Iterator[None]:
        """Let pass, while a pass is read, what is this rank's of each `batch` examples; before and after it all.

        Raises:
            UsageError: another pass is under way.
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
        """What came to the point for a step; None if nothing did."""
        found = Window(*self.windows.lookup(_key(step)).numpy()[0].tolist())
        return found if found.global_examples else None

    def forget(self, step: int) -> None:
        self.windows.remove(_key(step))

    def _reset(self, *reader: int) -> None:
        import tensorflow as tf

        # A pass that is given up ends when it is garbage, which may be while a function is being traced: there these
        # operations would become part of it, and wait for a lock that this thread holds.
        with tf.init_scope():
            self.windows.remove(self.windows.export()[0])
            self.reader.assign(reader)


def _key(step: int) -> Any:
    import tensorflow as tf

    return tf.constant([step], tf.int64)
