"""Embeddings split over ranks: by words (the table's rows) or by features (its columns)."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.parallel.group_collectives import gather_parts, sum_parts
from hvdtrain.parallel.tensor.split import SplitLayer, built_in_parts


class _ParallelEmbedding(SplitLayer, keras.layers.Embedding):
    """Embedding whose table is split along `_axis`."""

    _axis: int

    def __init__(
        self, input_dim: int, output_dim: int, *, group: Communicator, **kwargs: Any
    ) -> None:
        super().__init__(input_dim, output_dim, group=group, **kwargs)

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        with built_in_parts(self):
            super().build(input_shape)

    def split(self) -> None:
        self._cut(self._embeddings, self._axis)

    def _words(self, inputs: Any) -> tf.Tensor:
        """Return the word indices, negative ones counted from the end; an unknown index is an error, as on a CPU."""
        if not isinstance(inputs, tf.Tensor):
            raise UsageError(
                f"Layer {self.name!r}: a split Embedding accepts only dense tensors, not "
                f"{type(inputs).__name__}"
            )
        words = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        size = tf.constant(self.input_dim, words.dtype)
        words = tf.where(words < 0, words + size, words)
        known = tf.debugging.Assert(
            tf.reduce_all((words >= 0) & (words < size)),
            [f"Embedding {self.name!r}: an index is not in [0, {self.input_dim}):", words],
        )
        if tf.executing_eagerly():
            return words
        with tf.control_dependencies([known]):
            return tf.identity(words)


class VocabularyParallelEmbedding(_ParallelEmbedding):
    """Embedding split by words: rank i of n holds the i-th of n equal groups; vectors, or zeros, are summed.

    Args:
        input_dim: Number of words; a multiple of the group's size.
        output_dim: Number of features of a word.
        group: Ranks that split the layer.
        kwargs: Arguments of keras.layers.Embedding.
    """

    _axis = 0

    def call(self, inputs: Any) -> Any:
        part = self.input_dim // self.group.size()
        local = self._words(inputs) - self.group.rank() * part
        mine = (local >= 0) & (local < part)
        vectors = tf.gather(
            keras.ops.convert_to_tensor(self._embeddings),
            tf.where(mine, local, tf.zeros_like(local)),
        )
        vectors = tf.where(mine[..., tf.newaxis], vectors, tf.zeros_like(vectors))
        # Cast before the sum, which is exact because all but one of its terms are 0.
        vectors = keras.ops.cast(vectors, self.compute_dtype)
        return sum_parts(vectors, self.group, self.collective)


class ColumnParallelEmbedding(_ParallelEmbedding):
    """Embedding split by features: rank i of n holds the i-th of n equal groups of all words' features.

    Args:
        input_dim: Number of words.
        output_dim: Number of features of a word; a multiple of the group's size.
        group: Ranks that split the layer.
        kwargs: Arguments of keras.layers.Embedding.
    """

    _axis = 1

    def call(self, inputs: Any) -> Any:
        vectors = tf.gather(keras.ops.convert_to_tensor(self._embeddings), self._words(inputs))
        vectors = keras.ops.cast(vectors, self.compute_dtype)
        return gather_parts(vectors, self.group, self.collective)
