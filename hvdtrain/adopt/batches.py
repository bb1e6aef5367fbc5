"""How many examples a batch of a script has: its global batch, which the ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import is_batched
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.structures import count_examples
from hvdtrain.errors import UsageError

KERAS_DEFAULT = 32
"""Batch size of Keras for arrays, if no number of steps is given either."""
_DIVIDE_BATCHES = {
    f"_{name}Dataset"
    for name in ("FlatMap", "Interleave", "ParallelInterleave", "Rebatch", "Unbatch", "Window")
}


def batch_examples(x: Any, batch_size: int | None, steps: int | None) -> tuple[int, Any]:
    """Return the number of examples in a batch of `x`, and `x` with nothing read from it.

    Args:
        x: Data of a fit or an evaluation: what comes first in it, or (x, y[, sample_weight]).
        batch_size: The argument of the same name.
        steps: Number of steps in an epoch, if it is given.

    Raises:
        UsageError: The data has no batches, or their size cannot be found without reading it.
    """
    if isinstance(x, tf.data.Dataset):
        return _of_dataset(x), x
    if isinstance(x, keras.utils.PyDataset):
        return examples_in(x[0]), x
    if is_generator(x):
        first = next(x, None)
        if first is None:
            raise UsageError("The generator yields nothing")
        return examples_in(first), itertools.chain([first], x)
    if steps and not batch_size:
        return -(-count_examples(convert(unpack(x)), "the data") // steps), x
    return batch_size or KERAS_DEFAULT, x


def is_generator(data: Any) -> bool:
    """Return whether batches of `data` come one after the other, once.

    Keras's older iterators over images (ImageDataGenerator.flow) are PyDatasets with items of any number.
    """
    return isinstance(data, Iterator) and not isinstance(data, keras.utils.PyDataset)


def _of_dataset(dataset: tf.data.Dataset) -> int:
    """Return the batch size in the pipeline; to read a batch would change the order in which others come."""
    if not is_batched(dataset):
        raise UsageError("the tf.data.Dataset is not batched")
    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank}
    if len(sizes) == 1 and None not in sizes:
        return int(sizes.pop())
    found = _batch_size_in(dataset)
    if found is None:
        raise UsageError("the batch size of the tf.data.Dataset is not known: call batch() last")
    return found


def _batch_size_in(dataset: Any) -> int | None:
    """Return the size of the last `batch` in a pipeline, if its batches stay as they are."""
    if type(dataset).__name__ in _DIVIDE_BATCHES:
        return None
    size = getattr(dataset, "_batch_size", None)
    if size is not None:
        return int(size)
    found = {_batch_size_in(source) for source in dataset._inputs()}
    return found.pop() if len(found) == 1 else None


def examples_in(batch: Any) -> int:
    """Return the number of examples in a batch.

    Raises:
        UsageError: It has no arrays.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if getattr(leaf, "shape", ())]
    if not leaves:
        raise UsageError("a batch of the data has no arrays")
    return int(leaves[0].shape[0])
