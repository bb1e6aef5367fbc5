"""Gradient compression: none, float16 or bfloat16 on the wire, and sums over ranks in bfloat16 or int8.

float16 is Horovod's own. Horovod 0.28.1 has no bfloat16, so a bfloat16 reduction uses two collectives that only move
bits: an alltoall sends each rank its part of the tensor from all ranks, the rank adds the parts in float32, and an
allgather distributes the sums, again in bfloat16. The traffic is that of a ring allreduce in 16 bits, with the range
of float32 (float16 overflows above 65504) and float32 accumulation.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.tensorflow.compression import Compression as HorovodCompression
from horovod.tensorflow.compression import Compressor

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.error_feedback import PowerSGD, TopK

BF16_MIN_ELEMENTS = 16 * 1024
"""Number of elements below which a tensor is sent in float32: latency dominates; Horovod does not fuse alltoalls."""
INT8_BLOCK = 256
"""Number of int8 elements that share one float32 scale: 260 bytes for each block."""


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
    """Compression algorithms: `none`, `fp16` (Horovod's) and `bf16`; `power_sgd(rank=4)` and `top_k(fraction=0.01)`
    for DistributedOptimizer.
    """

    bf16 = BF16Compressor
    power_sgd = PowerSGD
    top_k = TopK


def bf16_sum(tensor: tf.Tensor, name: str, ranks: Communicator, factor: Any = 1.0) -> tf.Tensor:
    """Return the sum of `tensor` over the ranks, times `factor`. A collective.

    Each rank's input and the sum are rounded to bfloat16 once (relative error 2**-9 each).

    Args:
        tensor: Floating-point tensor of any shape, static or dynamic; the shape is the same on every rank.
        name: First part of the collectives' names.
        ranks: Ranks to sum over.
        factor: Factor for the sum: a float, or a scalar float32 tensor.
    """
    size = ranks.size_at_run()
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
    whole = tf.reshape(tf.cast(total * factor, tensor.dtype), tf.shape(tensor))
    return tf.ensure_shape(whole, tensor.shape)


def int8_sum(tensor: tf.Tensor, name: str, ranks: Communicator) -> tf.Tensor:
    """Return the sum of `tensor` over the ranks, sent as int8. A collective.

    Each rank's input and the sum are rounded once, in blocks of INT8_BLOCK numbers, to multiples of the block's
    largest magnitude / 127. The collectives are those of `bf16_sum`. With one rank, nothing is rounded.

    Args:
        tensor: Floating-point tensor of static shape; the shape is the same on every rank.
        name: First part of the collectives' names.
        ranks: Ranks to sum over.
    """
    size = ranks.size()
    if size == 1:
        return tensor
    flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32)
    elements = flat.shape.num_elements()
    part = -(-elements // (size * INT8_BLOCK))
    padded = tf.pad(flat, [[0, size * part * INT8_BLOCK - elements]])
    sent = _to_int8(tf.reshape(padded, [-1, INT8_BLOCK]))
    received = ranks.alltoall(sent, tf.fill([size], part), f"{name}_parts")
    parts = tf.reshape(_from_int8(received), [size, part, INT8_BLOCK])
    sums = ranks.allgather(_to_int8(tf.reduce_sum(parts, axis=0)), f"{name}_sums")
    total = tf.reshape(_from_int8(sums), [-1])[:elements]
    return tf.cast(tf.reshape(total, tensor.shape), tensor.dtype)


def _to_int8(blocks: tf.Tensor) -> tf.Tensor:
    """Quantize float32 `blocks` (blocks, INT8_BLOCK) to int8 (blocks, INT8_BLOCK + 4); each scale follows its block."""
    scales = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True) / 127.0
    levels = tf.cast(tf.round(tf.math.divide_no_nan(blocks, scales)), tf.int8)
    return tf.concat([levels, tf.reshape(tf.bitcast(scales, tf.int8), [-1, 4])], axis=1)


def _from_int8(packed: tf.Tensor) -> tf.Tensor:
    scales = tf.bitcast(packed[:, INT8_BLOCK:], tf.float32)
    return tf.cast(packed[:, :INT8_BLOCK], tf.float32) * scales[:, tf.newaxis]
