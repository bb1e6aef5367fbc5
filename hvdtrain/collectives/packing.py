"""Packing: which tensors travel together, and how many tensors become one vector for a single collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

Item = TypeVar("Item")

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
        sizes = [*map(_elements, shapes), padding]
        if any(map(tf.is_tensor, sizes)):
            sizes = tf.stack([tf.cast(size, tf.int64) for size in sizes])
    whole = tf.concat(
        [*(tf.reshape(tensor, [-1]) for tensor in tensors), tf.zeros([padding], dtype)], axis=0
    )
    parts = tf.split(collective(whole), sizes, num=len(tensors) + 1)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=False)]


def by_dtype(values: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the tensors or variables of each dtype."""
    found: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        # The dtype's name, because TensorFlow's dtypes compare equal to small integers.
        found.setdefault(value.dtype.name, []).append(place)
    return list(found.values())


def bounded_groups(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> list[list[Item]]:
    """Group `items`, in order, so that the sizes of a group add up to at most `limit`, or it has one member."""
    groups: list[list[Item]] = []
    total = 0
    for item in items:
        if not groups or total + size(item) > limit:
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += size(item)
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
