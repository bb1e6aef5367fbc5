"""Losses that are divided by what the whole global batch holds: unmasked entries, sample weights.

What they divide by is known only when all micro-batches of all copies of the model went forward. So a forward pass
leaves the model's outputs and what each loss counts in them; the counts are added up over the micro-batches, and
by one allreduce over the ranks of the last stage; then each micro-batch's loss is computed and goes backwards.
It costs the 1F1B schedule's small memory: all micro-batches of a step wait at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import compiled_losses
from hvdtrain.parallel.pipeline.stages import Stage


class Made(NamedTuple):
    """What the forward pass of a micro-batch leaves for its loss, a structure of tensors.

    Attributes:
        outputs: the model's, flat.
        masks: of padding, of those outputs that have one: what a tf.function returns carries none.
        own: what the layers of the stage add to the loss, in parts.
        counts: (losses,) what each divides by in this micro-batch.
    """

    outputs: list[Any]
    masks: list[Any]
    own: list[Any]
    counts: Any


def are_late(model: keras.Model, outputs: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Whether a compiled model has losses to be computed late.

    Args:
        model: the last stage's, its losses built.
        outputs: the whole model's, symbolic, with their masks.
        batch: symbolic predictions, labels and sample weights.
    """
    losses = compiled_losses(model)
    return bool(losses) and (
        any(graph_internals.mask_of(tensor) is not None for tensor in outputs)
        or any(loss.reduction == "mean_with_sample_weight" for loss in losses)
        or graph_internals.masks_itself(model, *batch)
    )


class LateLosses:
    """The losses of the last stage, in two phases: `count` in the forward pass, `loss` after `settle`.

    Args:
        stage: the last; its model is compiled.
        ranks: that hold the stage.
    """

    def __init__(self, stage: Stage, ranks: Communicator) -> None:
        self._model = stage.model
        self._whole = stage.whole
        self._ranks = ranks
        self._masked = [
            graph_internals.mask_of(tensor) is not None for tensor in stage.whole.outputs
        ]
        # Of the function that is traced: what was counted so far, or the totals not yet asked for.
        self._counted: list[tf.Tensor] = []
        self._totals: list[tf.Tensor] | None = None

    def count(self, outputs: Any, y: Any, weight: Any) -> Made:
        """Return what the losses of a micro-batch need later; `outputs` carry their masks."""
        flat = keras.tree.flatten(outputs)
        masks = [
            graph_internals.mask_of(tensor)
            for tensor, masked in zip(flat, self._masked, strict=True)
            if masked
        ]
        self._counted, self._totals = [], None
        graph_internals.compiled_loss(self._model, y, outputs, weight, track=False)
        # A function that returns its own argument has no gradient of it.
        return Made(
            [tf.identity(tensor) for tensor in flat],
            [tf.identity(mask) for mask in masks],
            graph_internals.own_losses(self._model),
            tf.stack(self._counted) if self._counted else tf.zeros([0]),
        )

    def settle(self, made: Sequence[Made]) -> tf.Tensor:
        """Return (losses,) what each divides by in the global batch. A collective of the ranks of the stage.

        Args:
            made: of all micro-batches of this rank, of which there may be more or fewer than another's.
        """
        mine = tf.add_n([one.counts for one in made])
        return self._ranks.allreduce(mine, "hvdtrain_pipeline_divisors") if mine.shape[0] else mine

    def loss(self, made: Made, totals: tf.Tensor, y: Any, weight: Any) -> tuple[Any, Any]:
        """Return the outputs as the model returned them, with their masks, and the loss."""
        masks = iter(made.masks)
        flat = [tf.identity(tensor) for tensor in made.outputs]
        for tensor, masked in zip(flat, self._masked, strict=True):
            if masked:
                graph_internals.give_mask(tensor, next(masks))
        outputs = graph_internals.like_outputs(self._whole, flat)
        self._totals = tf.unstack(totals)
        loss = graph_internals.compiled_loss(self._model, y, outputs, weight, track=True)
        assert not self._totals, "a loss counted and was not computed"
        return outputs, tf.add_n([loss, *(tf.cast(own, loss.dtype) for own in made.own)])

    def total(self, divisor: tf.Tensor) -> tf.Tensor:
        """Count `divisor`, or return the total of the one that was counted at this place.

        Both phases compute the losses in the same order.
        """
        if self._totals is None:
            self._counted.append(divisor)
            return divisor
        return self._totals.pop(0)
