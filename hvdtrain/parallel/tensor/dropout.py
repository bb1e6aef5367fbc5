"""Dropout on a split activation: this rank's part of the mask of the whole activation."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras_internals.overlay import adopt_names
from hvdtrain.parallel.tensor.split import SplitLayer


class PartDropout(SplitLayer, keras.layers.Dropout):
    """Dropout whose input is one part, along `split_axis`, of a larger activation.

    Every rank draws the whole mask from the same seed and uses its part, so that the mask equals that of the unsplit
    model and differs between the parts.
    """

    split_axis = -1

    def split(self) -> None:
        """Do nothing: dropout has no weights, and its seed is not split."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training or self.rate == 0:
            return inputs
        parts, axis = self.group.size(), self.split_axis % inputs.shape.rank
        whole = tf.concat(
            [
                tf.shape(inputs)[:axis],
                tf.shape(inputs)[axis : axis + 1] * parts,
                tf.shape(inputs)[axis + 1 :],
            ],
            axis=0,
        )
        mask = keras.random.dropout(
            tf.ones(whole, inputs.dtype), self.rate, seed=self.seed_generator
        )
        return inputs * tf.split(mask, parts, axis=axis)[self.group.rank()]


adopt_names(PartDropout, keras.layers.Dropout)
