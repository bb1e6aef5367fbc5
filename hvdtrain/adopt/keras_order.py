"""The order in which keras.Model.fit shuffles arrays, if the script has set a seed.

A script that calls keras.utils.set_random_seed or tf.random.set_seed trains on the same batches each time, and should
on several workers, too. Keras 3.15 then draws one order for all epochs, in a tf.data pipeline that is asked for it
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from hvdtrain.data.arrays import convert, unpack
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
    data: tuple[Any, Any, Any], batch_size: int, shuffle: bool | str
) -> tuple[Any, ...]:
    """Return (x[, y[, sample_weight]]) with the examples in the order in which Keras trains on them.

    Args:
        data: Arrays x, y and sample_weight; None for what is left out.
        batch_size: Number of examples in a batch.
        shuffle: As in keras.Model.fit.

    Raises:
        UsageError: These are not arrays of the same length.
    """
    arrays = convert(unpack(*data))
    examples = count_examples(arrays, "the data")
    adapter = ArrayDataAdapter(np.arange(examples)[:, None], batch_size=batch_size, shuffle=shuffle)
    batches = [batch.numpy().ravel() for batch in adapter.get_tf_dataset()]
    found: tuple[Any, ...] = take(arrays, np.concatenate(batches))
    return found
