"""The order in which keras.Model.fit shuffles arrays and the items of a PyDataset, if the script has set a seed.

A script that calls keras.utils.set_random_seed or tf.random.set_seed trains on the same batches each time, and should
on several workers, too. Keras 3.15 draws one order of arrays for all epochs, in a tf.data pipeline that is asked for it
here, and one order of items for each epoch, with Python's `random`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from hvdtrain.adopt.batches import examples_in
from hvdtrain.data.arrays import convert, is_arrays, unpack
from hvdtrain.data.py_dataset import is_py_dataset
from hvdtrain.data.structures import count_examples, take


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
        set_seed: Callable[[int], None] = tf.random.set_seed

        def noting(seed: int) -> None:
            self.is_set = True
            set_seed(seed)

        with mock.patch.object(tf.random, "set_seed", noting):
            yield


def in_keras_order(
    data: tuple[Any, Any, Any], batch_size: int, shuffle: bool | str, steps: int | None
) -> Any:
    """Return data for a Trainer that does not shuffle, in the order in which Keras shuffles `data`.

    Args:
        data: x, y and sample_weight of a fit; None for what is left out.
        batch_size: Number of examples in a batch.
        shuffle: As in keras.Model.fit.
        steps: Number of steps in an epoch; None: all of the data.

    Returns:
        (x[, y[, sample_weight]]) or a PyDataset; None for data of which only a Trainer's own order is known.

    Raises:
        UsageError: These are not arrays of the same length.
    """
    if is_arrays(data[0]):
        return _shuffled_arrays(unpack(*data), batch_size, shuffle)
    if is_py_dataset(data[0]) and steps is None and _has_equal_items(data[0]):
        return ShuffledItems(data[0])
    return None


class ShuffledItems(keras.utils.PyDataset):
    """The items of a PyDataset in an order that is drawn as Keras draws it when an epoch begins."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._order = list(range(dataset.num_batches))

    @property
    def num_batches(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index]]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()
        self._order = list(range(self._dataset.num_batches))
        random.shuffle(self._order)

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def _shuffled_arrays(data: Any, batch_size: int, shuffle: bool | str) -> tuple[Any, ...]:
    arrays = convert(data)
    examples = count_examples(arrays, "the data")
    adapter = ArrayDataAdapter(np.arange(examples)[:, None], batch_size=batch_size, shuffle=shuffle)
    batches = [batch.numpy().ravel() for batch in adapter.get_tf_dataset()]
    found: tuple[Any, ...] = take(arrays, np.concatenate(batches))
    return found


def _has_equal_items(dataset: Any) -> bool:
    """Whether the items of a PyDataset are equally long, as far as the first and the last one show.

    A Trainer takes a shorter one at the end only, so it cannot be shuffled among the others.
    """
    count = dataset.num_batches
    return bool(count) and examples_in(dataset[0]) == examples_in(dataset[count - 1])
