"""How keras.Model.fit shuffles arrays and the items of a PyDataset, if the script has set a seed, and takes the latter.

A script that calls keras.utils.set_random_seed or tf.random.set_seed trains on the same batches each time, and should
on several workers, too. Keras 3.15 draws one order of arrays for all epochs, in a tf.data pipeline that is asked for it
here, and one order of items for each epoch, with Python's `random`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.structures import count_examples, take
from hvdtrain.keras_internals.corrections import replaced


class ScriptsSeed:
    """Whether the script has set TensorFlow's seed.

    Attributes:
        is_set: True from the first call on.
    """

    def __init__(self) -> None:
        self.is_set = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note calls of tf.random.set_seed, which keras.utils.set_random_seed calls, in this block."""

        def noting(set_seed: Callable[[int], None], seed: int) -> None:
            self.is_set = True
            set_seed(seed)

        with replaced(tf.random, "set_seed", noting):
            yield


class KerasItems(keras.utils.PyDataset):
    """The items of a PyDataset as Keras trains on them: each is a batch, whatever its length.

    Args:
        dataset: The script's.
        shuffle: Whether to draw their order as Keras draws it when an epoch begins.
    """

    hvdtrain_items_are_batches = True

    def __init__(self, dataset: Any, shuffle: bool) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._shuffles = shuffle
        self._order: Sequence[int] = ()

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._dataset.num_batches
        return count

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index] if self._order else index]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()
        if self._shuffles and self.num_batches is not None:
            self._order = list(range(self.num_batches))
            random.shuffle(self._order)

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def in_keras_order(data: tuple[Any, Any, Any], batch_size: int, shuffle: bool | str) -> Any:
    """Return arrays for a Trainer that does not shuffle, in the order in which Keras shuffles them.

    Args:
        data: x, y and sample_weight of a fit; None for what is left out.
        batch_size: Number of examples in a batch.
        shuffle: As in keras.Model.fit.

    Returns:
        (x[, y[, sample_weight]]).

    Raises:
        UsageError: These are not arrays of the same length.
    """
    arrays = convert(unpack(*data))
    examples = count_examples(arrays, "the data")
    adapter = ArrayDataAdapter(np.arange(examples)[:, None], batch_size=batch_size, shuffle=shuffle)
    batches = [batch.numpy().ravel() for batch in adapter.get_tf_dataset()]
    return take(arrays, np.concatenate(batches))
