"""How many examples a batch of a script has: its global batch, which the ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter_utils import NUM_BATCHES_FOR_TENSOR_SPEC

from hvdtrain.data import is_batched
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.structures import count_examples
from hvdtrain.errors import UsageError

KERAS_DEFAULT = 32
"""Batch size of Keras for arrays, if no number of steps is given either."""


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
    if isinstance(x, Iterator):
        first = next(x, None)
        if first is None:
            raise UsageError("The generator yields nothing")
        return examples_in(first), itertools.chain([first], x)
    if steps and not batch_size:
        return -(-count_examples(convert(unpack(x)), "the data") // steps), x
    return batch_size or KERAS_DEFAULT, x


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
    """Return the size of the last `batch` in a pipeline."""
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


class Passes:
    """An iterator as an iterable, with the passes that Keras makes over a generator.

    The first one reads it. When it has ended, and another epoch begins, Keras yields the batches that it had looked at
    before the training once more.

    Args:
        once: The iterator.
        is_over: Whether the training has begun.
    """

    def __init__(self, once: Replayable, is_over: Callable[[], bool]) -> None:
        self._once = once
        self._is_over = is_over
        self._looked_at: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if self._is_over():
            yield from self._looked_at
            return
        for number, item in enumerate(itertools.chain(self._once.kept(), self._once)):
            if number == len(self._looked_at) < NUM_BATCHES_FOR_TENSOR_SPEC:
                self._looked_at.append(item)
            yield item


class Replayable:
    """An iterator whose first items come again from `again`, as long as `is_over` has not become true.

    Args:
        source: Iterator to read.
        is_over: Whether nobody will want them again, so that no more are kept.
    """

    def __init__(self, source: Iterator[Any], is_over: Callable[[], bool]) -> None:
        self._source = source
        self._is_over = is_over
        self._kept: list[Any] = []
        self._keeps = True

    def __iter__(self) -> Replayable:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        if self._keeps and self._kept and self._is_over():
            self._keeps = False
            self._kept.clear()
        if self._keeps:
            self._kept.append(item)
        return item

    def kept(self) -> list[Any]:
        """Return what was read, and is still to come again."""
        return list(self._kept)

    def again(self) -> Iterator[Any]:
        """Yield what was read, and then the rest. A generator, as Keras wants it."""
        yield from self._kept
        yield from self._source
