"""Gradients that lose something on the wire and make up for it: PowerSGD and top-k, with error feedback.

Error feedback (Seide et al. 2014, Karimireddy et al. 2019, arXiv:1901.09847): what a rank does not send of a gradient
it adds to the next one, so that in time all of it arrives. With d_r, the gradient of rank r plus its error, c(d_r) is
sent, all ranks receive the sum (or mean) of the c(d_r), and the next error is d_r - c(d_r).

The errors are variables of the reducer of a DistributedOptimizer, made when it is built: each rank has its own, a
checkpoint keeps them, and files for plain Keras do not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.variables import tf_variable

MIN_ELEMENTS = 1024
"""Smaller gradients travel whole: their time is latency."""


class Lossy(ABC):
    """A compression that loses something."""

    @abstractmethod
    def memory(self, variable: Any, number: int) -> Memory | None:
        """Return what compresses the gradients of `variable`; None: they travel whole.

        Args:
            variable: Keras or tf.Variable.
            number: of the variable, the same on all ranks.
        """


@dataclass(frozen=True)
class PowerSGD(Lossy):
    """Send two thin matrices in place of a gradient: Vogels et al. 2019 (arXiv:1905.13727).

    A gradient of n x m numbers (of a convolution: all dimensions but the last are n) travels as rank * (n + m). Those
    for which that is more than half of n * m, and vectors, travel whole. One step of the power iteration, from the
    last step's result.

    Args:
        rank: columns of the matrices.

    Raises:
        UsageError: `rank` is not a positive integer.
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
    """Send the largest numbers of each gradient, with their places: Aji and Heafield 2017 (arXiv:1704.05021).

    Every rank receives those of all ranks: 8 bytes for each, times the number of ranks.

    Args:
        fraction: of the numbers to send, above 0, at most 1.

    Raises:
        UsageError: `fraction` is out of range.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, Real) and 0 < self.fraction <= 1):
            raise UsageError(f"TopK: fraction={self.fraction!r}: pass a number above 0, at most 1")

    def memory(self, variable: Any, number: int) -> Memory | None:
        return _Largest(variable, self.fraction) if _is_large(variable) else None


class Memory(ABC):
    """What one variable's gradients have left on this rank.

    Attributes:
        error: float32, of the variable's number of elements.
        shared: further variables, the same on all ranks.
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
        total, sent, shared = self._exchanged(whole, name, ranks, op)
        # A gradient of nan, whose step on_nan may skip, must not stay.
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
        """Return the combined gradient, what of it this rank has sent, and values for `shared`."""


class _LowRank(Memory):
    """Algorithm 1 of the paper, within its algorithm 2."""

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
        size = ranks.size()
        values = ranks.allgather(tf.gather(whole, places), f"{name}_values")
        everywhere = ranks.allgather(places, f"{name}_places")
        # One after the other: the same order, and so the same bits, on all ranks.
        total = tf.zeros_like(whole)
        for of_rank, theirs in zip(tf.split(values, size), tf.split(everywhere, size), strict=True):
            total = tf.tensor_scatter_nd_add(total, theirs[:, tf.newaxis], of_rank)
        sent = tf.scatter_nd(places[:, tf.newaxis], tf.gather(whole, places), tf.shape(whole))
        return (total / size if op == Average else total), sent, []


def refuse_lossy(compression: Any, where: str) -> None:
    """Raise UsageError for a compression that only a DistributedOptimizer can have."""
    if isinstance(compression, Lossy):
        raise UsageError(
            f"{where}: compression={compression!r} remembers what it has not sent, and so works only with "
            "hvdtrain.keras.DistributedOptimizer"
        )


def _is_large(variable: Any) -> bool:
    return bool(
        tf_variable(variable).dtype.is_floating and math.prod(variable.shape) >= MIN_ELEMENTS
    )
