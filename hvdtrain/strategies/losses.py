"""Losses that are exact over parts of a batch: shares of ranks, micro-batches, rows of replicas.

The Trainer weights the loss of each part by its share, examples / global examples, and sums the gradients. For a mean
over examples that yields the mean over the global batch: sum_r (n_r / n) (S_r / n_r) = sum_r S_r / n. Weight penalties,
equal on all ranks, count once. Two kinds of losses need another factor, c, so that sum_r (n_r / n) c_r L_r is the
loss on one worker:

- a sum over examples: c_r = n / n_r;
- a mean over unmasked entries (padding, ignore_class) or over sample weights, whose divisor D_r is not proportional to
  n_r: c_r = (D_r / D) / (n_r / n), where D is the sum of the D_r. It comes from one small allreduce per step, or from
  the code that computes the losses in parts.

A loss is changed in place into an instance of a subclass of its class, like the optimizer; files record the original
class.
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
    """Sums a loss's divisor over the ranks, by an allreduce in the step that computes the loss.

    Attributes:
        ranks: Ranks that compute the parts.
    """

    ranks: Communicator

    def __call__(self, divisor: tf.Tensor) -> tf.Tensor:
        return self.ranks.allreduce(divisor, "hvdtrain_divisor")


class _ExactLoss:
    """Mixin that multiplies the result of a keras.losses.Loss by the factor c."""

    hvdtrain_mask: Any = None
    """Mask of the values that `call` has just computed: the entries that the loss itself ignores."""
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
    """Make the losses of a built, compiled model exact within a step; outside a step they remain Keras's."""
    for loss in compiled_losses(model):
        overlay(loss, _ExactLoss)
    object.__setattr__(model, "_compute_loss", functools.partial(_exact_total, model))


def _exact_total(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Return the result of compute_loss, weighted so that its gradients add up over ranks, and its mean is kept."""
    loss = type(model)._compute_loss(model, *args, **kwargs)
    step = current_step()
    if step is None:
        return loss
    if tf.is_tensor(loss) and loss.shape.rank != 0:
        # The tape differentiates the sum of the elements, and the logs show their mean.
        mean, total = tf.reduce_mean(loss), _over_share(tf.reduce_sum(loss), step.share)
        return tf.stop_gradient(mean - total) + total
    return _over_share(loss, step.share) if step.loss_is_sum else loss
