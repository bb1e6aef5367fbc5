"""Losses that are exact over shares of a batch: of ranks, of micro-batches, of replicas in one process.

The Trainer weighs each part's loss by its share, examples / global examples, and adds the gradients up. For
a mean over examples that is the mean over the global batch: sum_r (n_r / n) (S_r / n_r) = sum_r S_r / n.
Weight penalties, equal on all ranks, count once. Two kinds of losses need a factor more, c, so that
sum_r (n_r / n) c_r L_r is what one worker gets:

- a sum over examples: c_r = n / n_r;
- a mean over the unmasked entries (padding, ignore_class), or over sample weights, whose divisor D_r differs
  between the ranks by other than n_r: c_r = (D_r / D) / (n_r / n), D being the sum of the D_r: one small
  allreduce a step, or what whoever computes the losses in parts knows.

A loss becomes an instance of a subclass of its class, in place, as the optimizer does, and files name the
original.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.collectives.step_context import current_step
from hvdtrain.errors import warn_user
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import compiled_losses, loss_weights, mask_in_loss
from hvdtrain.keras_internals.overlay import overlay


@dataclass(frozen=True)
class TotalOfRanks:
    """Asks the other ranks, by an allreduce in the step that computes the loss.

    Attributes:
        ranks: that compute the parts.
    """

    ranks: Communicator

    def __call__(self, divisor: tf.Tensor) -> tf.Tensor:
        return self.ranks.allreduce(divisor, "hvdtrain_divisor")


class _ExactLoss:
    """Lays the factor c over the __call__ of a keras.losses.Loss."""

    hvdtrain_mask: Any = None
    """Of what `call` has just found: entries that the loss itself leaves out."""
    hvdtrain_warned = False

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = super().call(y_true, y_pred)  # type: ignore[misc]
        self.hvdtrain_mask = graph_internals.mask_of(values)
        step = current_step()
        if getattr(values, "shape", ()) == () and step is not None and not step.checked:
            self._warn_of_scalar()
        return values

    def _warn_of_scalar(self) -> None:
        if ALL_RANKS.rank() == 0 and not self.hvdtrain_warned:
            self.hvdtrain_warned = True
            kind = "sum" if self.reduction == "sum" else "mean"  # type: ignore[attr-defined]
            warn_user(
                f"The loss {self.name!r} returns one number for a batch, but each worker has only "  # type: ignore[attr-defined]
                f"a part of the batch: the number is treated as a {kind} over the examples. If it "
                "is anything else, training differs from training on one worker: let the loss "
                "return one value per example"
            )

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = super().__call__(y_true, y_pred, sample_weight)  # type: ignore[misc]
        own_mask, self.hvdtrain_mask = self.hvdtrain_mask, None
        step = current_step()
        if step is None or self.reduction in (None, "none"):  # type: ignore[attr-defined]
            return loss
        if self.reduction == "sum":  # type: ignore[attr-defined]
            return _over_share(loss, step.share)
        mask = mask_in_loss(y_pred, own_mask)
        weights = loss_weights(self, mask, sample_weight)
        if weights is None:
            return loss
        divisor = tf.stop_gradient(tf.cast(tf.reduce_sum(weights), tf.float32))
        divisor = tf.where(step.is_idle(), 0.0, divisor)
        part = tf.cast(tf.math.divide_no_nan(divisor, step.total(divisor)), loss.dtype)
        return _over_share(tf.math.multiply_no_nan(loss, part), step.share)


def _over_share(value: tf.Tensor, share: tf.Variable) -> tf.Tensor:
    return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))


def make_exact(model: keras.Model) -> None:
    """Give the losses of a built, compiled model the factor that they need in a step; elsewhere they are Keras's."""
    for loss in compiled_losses(model):
        overlay(loss, _ExactLoss)
    object.__setattr__(model, "_compute_loss", functools.partial(_exact_total, model))


def _exact_total(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """What compute_loss returns, weighed so that over the ranks its gradient adds up, and its mean is theirs."""
    loss = type(model)._compute_loss(model, *args, **kwargs)
    step = current_step()
    if step is None:
        return loss
    if tf.is_tensor(loss) and loss.shape.rank != 0:
        # A tape takes the gradient of its sum, and the logs show its mean.
        mean, total = tf.reduce_mean(loss), _over_share(tf.reduce_sum(loss), step.share)
        return tf.stop_gradient(mean - total) + total
    return _over_share(loss, step.share) if step.loss_is_sum else loss
