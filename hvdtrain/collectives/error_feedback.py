"""Lossy gradient compression with error feedback: PowerSGD and top-k.

Error feedback (Seide et al. 2014, Karimireddy et al. 2019, arXiv:1901.09847): a rank adds the part of a gradient that
it did not send to the next gradient, so that all of it arrives in time. Let d_r be the gradient of rank r plus its
error. The rank sends c(d_r), all ranks receive the sum (or mean) of the c(d_r), and the next error is d_r - c(d_r).

The errors are variables of a DistributedOptimizer's reducer, created when it is built. They differ between ranks;
checkpoints include them, files for plain Keras do not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.variables import tf_variable

MIN_ELEMENTS = 1024
"""Number of elements below which a gradient is sent uncompressed: latency dominates."""


class Lossy(ABC):
    """Lossy compression with error feedback, for a DistributedOptimizer."""

    @abstractmethod
    def memory(self, variable: Any, number: int) -> Memory | None:
        """Return the compressor of the gradients of `variable`; None: they are sent uncompressed.

        Args:
            variable: Keras variable or tf.Variable.
            number: Number of the variable, the same on all ranks.
        """


@dataclass(frozen=True)
class PowerSGD(Lossy):
    """Low-rank compression of gradients: Vogels et al. 2019 (arXiv:1905.13727).

    Sends two factors, rank * (n + m) numbers, in place of a gradient viewed as an n x m matrix, where m is the
    variable's last dimension. Vectors, gradients of fewer than MIN_ELEMENTS elements, and those whose factors have more
    than half as many numbers are sent uncompressed. Each step runs one power iteration, starting from the last step's
    result.

    Args:
        rank: Rank of the approximation: the number of columns of each factor.

    Raises:
        UsageError: If `rank` is not a positive integer.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        require_integer("PowerSGD: rank", self.rank)

    def memory(self, variable: Any, number: int) -> Memory | None:
        *first, columns = variable.shape
        rows = math.prod(first)
        fits = 2 * self.rank * (rows + columns) <= rows * columns
        return _LowRank(variable, self.rank, number) if _is_large(variable) and fits else None


@dataclass(frozen=True)
class TopK(Lossy):
    """Sparsification: sends the elements of largest magnitude, and their indices, of each gradient.

    Aji and Heafield 2017 (arXiv:1704.05021). Every rank receives the elements of all ranks, 8 bytes each, so traffic
    grows with the number of ranks. Gradients of fewer than MIN_ELEMENTS elements are sent uncompressed.

    Args:
        fraction: Fraction of each gradient's elements to send, above 0 and at most 1.

    Raises:
        UsageError: If `fraction` is out of range.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, Real) and 0 < self.fraction <= 1):
            raise UsageError(f"TopK: fraction={self.fraction!r}: pass a number above 0, at most 1")

    def memory(self, variable: Any, number: int) -> Memory | None:
        return _Largest(variable, self.fraction) if _is_large(variable) else None


class Memory(ABC):
    """Compressor of one variable's gradients, with this rank's error.

    Attributes:
        error: Part of past gradients that was not sent yet; float32 of shape (elements of the variable,).
        shared: Further variables, equal on all ranks.
    """

    def __init__(self, variable: Any) -> None:
        with tf.init_scope():
            self.error = tf.Variable(tf.zeros([math.prod(variable.shape)]), trainable=False)
        self.shared: list[tf.Variable] = []

    def reduce(
        self, gradient: tf.Tensor, name: str, ranks: Communicator, op: Any, factor: float
    ) -> tf.Tensor:
        """Return the gradients of all ranks, combined by `op` (Average or Sum), times `factor`. A collective."""
        whole = tf.reshape(tf.cast(gradient, tf.float32), [-1]) + self.error
        # All nan, if any is: the part that is sent may leave it out.
        whole = tf.where(tf.reduce_all(tf.math.is_finite(whole)), whole, np.nan)
        total, sent, shared = self._exchanged(whole, name, ranks, op)
        # on_nan may skip a step whose gradient is nan: keep it out of the error.
        fine = tf.reduce_all(tf.math.is_finite(total))
        targets, values = [self.error, *self.shared], [whole - sent, *shared]
        kept = [
            target.assign(tf.where(fine, value, target), read_value=False)
            for target, value in zip(targets, values, strict=True)
        ]
        with tf.control_dependencies([one for one in kept if one is not None]):
            return tf.cast(tf.reshape(total * factor, gradient.shape), gradient.dtype)

    @abstractmethod
    def _exchanged(
        self, whole: tf.Tensor, name: str, ranks: Communicator, op: Any
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Return the combined gradient, the part that this rank sent, and new values for `shared`."""


class _LowRank(Memory):
    """PowerSGD: algorithm 1 of the paper, within its algorithm 2."""

    def __init__(self, variable: Any, rank: int, number: int) -> None:
        super().__init__(variable)
        columns = variable.shape[-1]
        self._shape = [math.prod(variable.shape) // columns, columns]
        with tf.init_scope():
            begin = tf.random.stateless_normal([columns, rank], seed=[number, rank])
            self.shared = [tf.Variable(begin, trainable=False)]

    def _exchanged(
        self, whole: tf.Tensor, name: str, ranks: Communicator, op: Any
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        matrix = tf.reshape(whole, self._shape)
        left = ranks.allreduce(tf.matmul(matrix, self.shared[0]), f"{name}_left", op)
        left = tf.linalg.qr(left).q
        own = tf.matmul(matrix, left, transpose_a=True)
        right = ranks.allreduce(own, f"{name}_right", op)
        total, sent = (
            tf.reshape(tf.matmul(left, one, transpose_b=True), [-1]) for one in (right, own)
        )
        return total, sent, [right]


class _Largest(Memory):
    def __init__(self, variable: Any, fraction: float) -> None:
        super().__init__(variable)
        self._count = math.ceil(fraction * math.prod(variable.shape))

    def _exchanged(
        self, whole: tf.Tensor, name: str, ranks: Communicator, op: Any
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        _, places = tf.math.top_k(tf.abs(whole), self._count, sorted=False)
        values = ranks.allgather(tf.gather(whole, places), f"{name}_values")
        everywhere = ranks.allgather(places, f"{name}_places")
        # Add in the order of ranks, so that the sum is bitwise equal on all of them.
        total = tf.foldl(
            lambda sums, of_rank: tf.tensor_scatter_nd_add(
                sums, of_rank[1][:, tf.newaxis], of_rank[0]
            ),
            [tf.reshape(one, [-1, self._count]) for one in (values, everywhere)],
            tf.zeros_like(whole),
        )
        sent = tf.scatter_nd(places[:, tf.newaxis], tf.gather(whole, places), tf.shape(whole))
        return (ranks.divide(total) if op == Average else total), sent, []


def refuse_lossy(compression: Any, where: str) -> None:
    """Raise UsageError if `compression` works only with a DistributedOptimizer."""
    if isinstance(compression, Lossy):
        raise UsageError(
            f"{where}: compression={compression!r} carries its error over to the next step, so it only works with "
            "hvdtrain.keras.DistributedOptimizer"
        )


def _is_large(variable: Any) -> bool:
    return bool(
        tf_variable(variable).dtype.is_floating and math.prod(variable.shape) >= MIN_ELEMENTS
    )
