"""Gradient compression: none, float16 or bfloat16 on the wire.

float16 is Horovod's own. Horovod 0.28.1 has no bfloat16, so a bfloat16 reduction uses two collectives that only move
bits: an alltoall brings every rank its part of the tensor from all ranks, the rank adds the parts in float32, and an
allgather distributes the sums, again in bfloat16. The traffic is that of a ring allreduce in 16 bits, with the range
of float32 (float16 overflows above 65504) and additions in float32.
"""

from __future__ import annotations

import tensorflow as tf
from horovod.tensorflow.compression import Compression as HorovodCompression
from horovod.tensorflow.compression import Compressor

from hvdtrain.collectives.communicator import Communicator

BF16_MIN_ELEMENTS = 16 * 1024
"""Size below which a tensor travels as float32: latency dominates, and Horovod does not fuse alltoalls."""


class BF16Compressor(Compressor):
    """Compressor that rounds floating-point tensors to bfloat16 on the wire; sums are computed in float32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Return `tensor` rounded to bfloat16 (as uint16 bits) and its dtype."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.uint16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Return the result of `compress` as a tensor of dtype `ctx`."""
        if not ctx.is_floating:
            return tensor
        return tf.cast(tf.bitcast(tensor, tf.bfloat16), ctx)


class Compression(HorovodCompression):
    """Compression algorithms: `none`, `fp16` (Horovod's) and `bf16`."""

    bf16 = BF16Compressor


def bf16_sum(tensor: tf.Tensor, name: str, ranks: Communicator, factor: float = 1.0) -> tf.Tensor:
    """Return the sum of `tensor` over the ranks, times `factor`. A collective.

    Each rank's input and the sum are rounded to bfloat16 once (relative error 2**-9 each).

    Args:
        tensor: Floating-point tensor of any shape, static or dynamic; the shape is the same on every rank.
        name: First part of the collectives' names.
        ranks: Ranks to sum over.
        factor: Factor for the sum.
    """
    size = ranks.size()
    flat = tf.reshape(tensor, [-1])
    elements = tf.size(flat)
    part = -(-elements // size)
    padded = tf.pad(flat, [[0, part * size - elements]])
    bits, _ = BF16Compressor.compress(padded)
    received = ranks.alltoall(bits, tf.fill([size], part), f"{name}_parts")
    parts = BF16Compressor.decompress(tf.reshape(received, [size, part]), tf.float32)
    sums, _ = BF16Compressor.compress(tf.reduce_sum(parts, axis=0))
    gathered = ranks.allgather(sums, f"{name}_sums")
    total = BF16Compressor.decompress(gathered[:elements], tf.float32)
    scaled = total if factor == 1.0 else total * factor
    whole = tf.reshape(tf.cast(scaled, tensor.dtype), tf.shape(tensor))
    return tf.ensure_shape(whole, tensor.shape)
