"""SyncBatchNormalization: batch normalization with the statistics of the whole global batch.

Each rank computes count, mean and variance of its own examples; one allgather exchanges these few numbers, and each
rank combines them by Chan's formula, which avoids cancellation, unlike Horovod's E[x^2] - E[x]^2.

Gradient: a rank's mean and variance enter the losses of all ranks, so the gradients with respect to the global
moments are summed over the ranks (one allreduce) before they are propagated to the rank's own examples. The gradients
summed over the ranks are then those of the sum of the losses, and their average, which DistributedOptimizer computes,
is that of one process with the whole batch. With batches of different sizes, the weight must be in the loss, before
the backward pass (the Trainer puts it there); weighting the gradients afterwards is too late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.step_context import current_step
from hvdtrain.collectives.tensor_names import InstanceName
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.overlay import overlay


class _Synchronized:
    """Mixin for a BatchNormalization that normalizes over the batches of all ranks during training."""

    hvdtrain_synchronized = True
    """Marks layers whose statistics are those of all ranks in every training step."""

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance over all ranks, each of shape (channels,). Called by Keras in training."""
        if not hvd.is_initialized() or ALL_RANKS.is_alone():
            return super()._moments(inputs, mask)  # type: ignore[misc]
        count, mean, variance = local_moments(inputs, mask, self._reduction_axes)  # type: ignore[attr-defined]
        if (step := current_step()) is not None:
            count = tf.where(step.is_idle(), tf.zeros_like(count), count)
        name = self.collective_name((), ALL_RANKS)  # type: ignore[attr-defined]
        combined = combine_moments(_gather(tf.stack([count, mean, variance]), name))
        mean, variance = tf.unstack(_with_summed_gradient(combined, f"{name}_gradient"))
        return mean, variance


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(_Synchronized, keras.layers.BatchNormalization):
    """A keras.layers.BatchNormalization that normalizes over the batches of all ranks during training.

    Every unmasked position of every example has the same weight, however the batch is divided. Inference needs no
    communication. XLA cannot compile this layer; Keras turns `jit_compile` off.

    Args:
        fused: For compatibility with Horovod; must be False.
        kwargs: Arguments of keras.layers.BatchNormalization, except `synchronized`.

    Raises:
        UsageError: `fused` or `synchronized` is True.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise UsageError("SyncBatchNormalization: fused=True is not supported: leave it out")
        if kwargs.pop("synchronized", False):
            raise UsageError(
                "SyncBatchNormalization: synchronized=True is for tf.distribute; all ranks are synchronized anyway"
            )
        super().__init__(**kwargs)
        self.supports_jit = False
        self.collective_name = InstanceName("sync_batch_norm")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["synchronized"]
        return config


@contextlib.contextmanager
def synchronized(model: keras.Model) -> Iterator[None]:
    """In this block, let all BatchNormalization layers of `model` normalize over the batches of all ranks."""
    plain = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, _Synchronized)
    ]
    kinds = list(map(type, plain))
    for layer in plain:
        if not hasattr(layer, "collective_name"):
            object.__setattr__(layer, "collective_name", InstanceName("sync_batch_norm"))
        overlay(layer, _Synchronized)
    try:
        yield
    finally:
        for layer, kind in zip(plain, kinds, strict=True):
            layer.__class__ = kind


def local_moments(
    inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return count, mean and variance of `inputs` over `axes`, each of shape (channels,); 0 without examples.

    Args:
        inputs: Floating-point tensor with any number of dimensions.
        mask: Bool tensor of the shape of `inputs` without its last dimension, False for entries to ignore; or None.
        axes: All axes but that of the channels.
    """
    if mask is None:
        counted = tf.ones_like(inputs, tf.bool)
    else:
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    weights = tf.cast(counted, inputs.dtype)
    count = tf.reduce_sum(weights, axes, keepdims=True)
    # tf.where, not a product: a masked entry may be inf or nan.
    zero = tf.zeros_like(inputs)
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(tf.where(counted, inputs, zero), axes, keepdims=True), count
    )
    # To first order the variance does not depend on the mean, so stop_gradient loses nothing.
    offsets = tf.where(counted, inputs - tf.stop_gradient(mean), zero)
    variance = tf.math.divide_no_nan(tf.reduce_sum(tf.square(offsets), axes, keepdims=True), count)
    return tf.reshape(count, [-1]), tf.reshape(mean, [-1]), tf.reshape(variance, [-1])


def combine_moments(rows: tf.Tensor) -> tf.Tensor:
    """Combine the moments of several parts into those of the whole.

    Chan, Golub and LeVeque 1979: var = sum n_i (var_i + (mean_i - mean)^2) / sum n_i.

    Args:
        rows: Count, mean and variance of each part, of shape (parts, 3, channels).

    Returns:
        Mean and variance, of shape (2, channels).
    """
    counts, means, variances = tf.unstack(rows, axis=1)
    weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, axis=0))
    mean = tf.reduce_sum(tf.math.multiply_no_nan(means, weights), axis=0)
    spread = variances + tf.square(means - mean)
    return tf.stack([mean, tf.reduce_sum(tf.math.multiply_no_nan(spread, weights), axis=0)])


def _gather(row: tf.Tensor, name: str) -> tf.Tensor:
    """Return the rows of all ranks, stacked; differentiable with respect to this rank's own row."""

    @tf.custom_gradient
    def gather(row: tf.Tensor) -> tuple[tf.Tensor, Any]:
        rows = ALL_RANKS.allgather(row[tf.newaxis], name)
        rows = tf.ensure_shape(rows, [None, *row.shape])
        return rows, lambda gradient: gradient[ALL_RANKS.rank_at_run()]

    return gather(row)


def _with_summed_gradient(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Return `tensor`, which is the same on all ranks, with a gradient that is the sum of all ranks' gradients.

    If the step multiplies gradients by the ranks' shares afterwards, the sum here is weighted by the shares, too, and
    divided by this rank's share.
    """
    step = current_step()
    share = None if step is None or step.share_in_loss else step.share

    @tf.custom_gradient
    def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def summed(gradient: tf.Tensor) -> tf.Tensor:
            part = 1.0 if share is None else tf.cast(share, gradient.dtype)
            return tf.math.divide_no_nan(ALL_RANKS.allreduce(gradient * part, name), part)

        return tf.identity(tensor), summed

    return identity(tensor)
