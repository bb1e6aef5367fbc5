"""A generator that is looked at before a training, and may have to be read from its beginning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from keras.src.trainers.data_adapters.data_adapter_utils import NUM_BATCHES_FOR_TENSOR_SPEC


class Replayed:
    """An iterator as an iterable, with the passes that Keras makes over a generator.

    Those before the training begin with what was read before. When the training has begun, and another epoch begins,
    Keras yields the batches that it had looked at before it once more.

    Args:
        source: Iterator to read.
        has_trained: Whether the training has begun, so that no more items are kept.
    """

    def __init__(self, source: Iterator[Any], has_trained: Callable[[], bool]) -> None:
        self._source = source
        self._has_trained = has_trained
        self._kept: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if self._has_trained():
            yield from self._kept[:NUM_BATCHES_FOR_TENSOR_SPEC]
            return
        yield from list(self._kept)
        keeps = True
        for item in self._source:
            keeps = keeps and not self._has_trained()
            if keeps or len(self._kept) < NUM_BATCHES_FOR_TENSOR_SPEC:
                self._kept.append(item)
            else:
                del self._kept[NUM_BATCHES_FOR_TENSOR_SPEC:]
            yield item

    def again(self) -> Iterator[Any]:
        """Yield what was read before the training, and then the rest. A generator, as Keras wants it."""
        if not self._has_trained():
            yield from self._kept
        yield from self._source
