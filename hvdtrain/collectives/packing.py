"""Packing: which tensors travel together, and how many tensors become one vector for a single collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_UNIT = 251
"""The lengths of packed tensors are a multiple of this, a prime, plus a code of their shapes."""
_MOST_AXES = 254
"""Of a tensor, in TensorFlow."""


def as_one(
    tensors: Sequence[tf.Tensor], collective: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Return the results for `tensors` of an elementwise collective, to which all their elements are one vector.

    In place of Horovod's grouped operations: they lose the error of a tensor whose shape differs between ranks if
    another tensor of the group arrives after it, and return what the memory contained.

    Args:
        tensors: Tensors of one dtype.
        collective: Function of one tensor.
    """
    if len(tensors) < 2:
        return [collective(tensor) for tensor in tensors]
    dtype = tensors[0].dtype
    shapes = list(map(_shape_of, tensors))
    # Horovod compares the lengths. Zeros make them differ where the shapes do: a multiple of _UNIT, and a code below it
    # that no other number of elements makes up for. Shapes that are only known at run time are in main memory.
    with tf.device("CPU:0"):
        code = sum(pow(31, 1 + place, _UNIT) * _code(shape) for place, shape in enumerate(shapes))
        padding = -sum(map(_elements, shapes)) % _UNIT + code % _UNIT
    padded = [*tensors, tf.zeros([padding], dtype)]
    return unpack(collective(pack(padded, dtype)), padded)[:-1]


def pack(values: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """Return all elements of `values` (tensors or variables) as one vector of `dtype`, for a single collective."""
    return tf.concat([tf.reshape(tf.cast(value, dtype), [-1]) for value in values], axis=0)


def unpack(flat: tf.Tensor, values: Sequence[Any]) -> list[tf.Tensor]:
    """Return the parts of `flat`, a result of `pack(values, ...)`, in the shapes and dtypes of `values`."""
    shapes = list(map(_shape_of, values))
    with tf.device("CPU:0"):
        sizes = list(map(_elements, shapes))
        if any(map(tf.is_tensor, sizes)):
            sizes = tf.stack([tf.cast(size, tf.int64) for size in sizes])
    parts = tf.split(flat, sizes, num=len(values))
    return [
        tf.cast(tf.reshape(part, shape), value.dtype)
        for part, shape, value in zip(parts, shapes, values, strict=True)
    ]


def by_dtype(values: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the tensors or variables of each dtype."""
    found: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        # The dtype's name, because TensorFlow's dtypes compare equal to small integers.
        found.setdefault(value.dtype.name, []).append(place)
    return list(found.values())


def bounded_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group the indices of `sizes`, in order, so that each group's sum is at most `limit` or it has one member."""
    groups: list[list[int]] = []
    total = 0
    for place, size in enumerate(sizes):
        if not groups or total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(place)
        total += size
    return groups


def _shape_of(value: Any) -> Any:
    """Return the shape, as an int64 tensor if it is not known before the run."""
    return value.shape if value.shape.is_fully_defined() else tf.shape(value, tf.int64)


def _elements(shape: Any) -> Any:
    return tf.reduce_prod(shape) if tf.is_tensor(shape) else math.prod(shape)


def _code(shape: Any) -> Any:
    """Return a number that tells shapes of as many elements apart."""
    if not tf.is_tensor(shape):
        return sum(pow(31, axis, _UNIT) * length for axis, length in enumerate(shape))
    factors = tf.constant([pow(31, axis, _UNIT) for axis in range(_MOST_AXES)], tf.int64)
    return tf.reduce_sum(shape % _UNIT * factors[: tf.size(shape)])
