"""Losses whose divisor depends on the whole global batch: the number of unmasked entries, the sum of sample weights.

The divisor is known only when all micro-batches of all copies of the model have been forward. So the forward pass keeps
the model's outputs and each loss's divisor for the micro-batch; the divisors are summed over the micro-batches, and by
one allreduce over the ranks of the last stage; then the losses are computed and differentiated micro-batch by
micro-batch. This gives up the small memory of the 1F1B schedule: all micro-batches of a step are in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import (
    added_losses,
    compiled_loss,
    compiled_losses,
    masks_itself,
)
from hvdtrain.parallel.pipeline.stages import Stage


class ForwardResult(NamedTuple):
    """What the forward pass of a micro-batch keeps for the computation of its loss; a structure of tensors.

    Attributes:
        outputs: The model's outputs, flat.
        masks: Padding masks of the outputs that have one, since the results of a tf.function carry none.
        own: Losses that the layers of the stage add (regularizers, add_loss).
        counts: Divisor of each loss for this micro-batch, of shape (losses,).
    """

    outputs: list[Any]
    masks: list[Any]
    own: list[Any]
    counts: Any


def are_late(model: keras.Model, outputs: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Return whether a compiled model has losses that can only be computed late.

    Args:
        model: Model of the last stage, with its losses built.
        outputs: Symbolic outputs of the whole model, with their masks.
        batch: Symbolic predictions, labels and sample weights.
    """
    losses = compiled_losses(model)
    return bool(losses) and (
        any(graph_internals.mask_of(tensor) is not None for tensor in outputs)
        or any(loss.reduction == "mean_with_sample_weight" for loss in losses)
        or masks_itself(model, *batch)
    )


class LateLosses:
    """The losses of the last stage in two phases: `count` in the forward pass, `loss` after `reduce_divisors`.

    Args:
        stage: Last stage, with a compiled model.
        ranks: Ranks that hold the stage.
    """

    def __init__(self, stage: Stage, ranks: Communicator) -> None:
        self._model = stage.model
        self._whole = stage.whole
        self._ranks = ranks
        self._masked = [
            graph_internals.mask_of(tensor) is not None for tensor in stage.whole.outputs
        ]
        # State while a function is traced: the divisors counted so far, or the totals not yet used.
        self._counted: list[tf.Tensor] = []
        self._totals: list[tf.Tensor] | None = None

    def count(self, outputs: Any, y: Any, weight: Any) -> ForwardResult:
        """Return what the losses of a micro-batch need later; `outputs` carry their masks."""
        flat = keras.tree.flatten(outputs)
        masks = [
            graph_internals.mask_of(tensor)
            for tensor, masked in zip(flat, self._masked, strict=True)
            if masked
        ]
        self._counted, self._totals = [], None
        compiled_loss(self._model, y, outputs, weight, track=False)
        # TensorFlow gives no gradient for an argument that a function returns unchanged.
        return ForwardResult(
            [tf.identity(tensor) for tensor in flat],
            [tf.identity(mask) for mask in masks],
            added_losses(self._model),
            tf.stack(self._counted) if self._counted else tf.zeros([0]),
        )

    def reduce_divisors(self, made: Sequence[ForwardResult]) -> tf.Tensor:
        """Return the divisor of each loss for the global batch, of shape (losses,). A collective of the stage's ranks.

        Args:
            made: Results of `count` for all micro-batches of this rank; their number may differ between ranks.
        """
        mine = tf.add_n([one.counts for one in made])
        return self._ranks.allreduce(mine, "hvdtrain_pipeline_divisors") if mine.shape[0] else mine

    def loss(self, made: ForwardResult, totals: tf.Tensor, y: Any, weight: Any) -> tuple[Any, Any]:
        """Return the model's outputs, in its own structure and with masks, and the loss of a micro-batch."""
        masks = iter(made.masks)
        flat = [tf.identity(tensor) for tensor in made.outputs]
        for tensor, masked in zip(flat, self._masked, strict=True):
            if masked:
                graph_internals.give_mask(tensor, next(masks))
        outputs = graph_internals.like_outputs(self._whole, flat)
        self._totals = tf.unstack(totals)
        loss = compiled_loss(self._model, y, outputs, weight, track=True)
        assert not self._totals, "a loss counted and was not computed"
        return outputs, tf.add_n([loss, *(tf.cast(own, loss.dtype) for own in made.own)])

    def total(self, divisor: tf.Tensor) -> tf.Tensor:
        """Record `divisor` in the first phase; return the total that belongs to it in the second.

        Both phases compute the losses in the same order.
        """
        if self._totals is None:
            self._counted.append(divisor)
            return divisor
        return self._totals.pop(0)
