"""Packing: which tensors travel together, and how many tensors become one vector for a single collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_CODES = 61


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
    # Zeros make the lengths differ where the shapes do, also if their sums are equal: Horovod compares the lengths.
    padding = sum((1 + place) * _shape_code(t) for place, t in enumerate(tensors)) % _CODES
    padded = [*tensors, tf.zeros([padding], dtype)]
    return unpack(collective(pack(padded, dtype)), padded)[:-1]


def pack(values: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """Return all elements of `values` (tensors or variables) as one vector of `dtype`, for a single collective."""
    return tf.concat([tf.reshape(tf.cast(value, dtype), [-1]) for value in values], axis=0)


def unpack(flat: tf.Tensor, values: Sequence[Any]) -> list[tf.Tensor]:
    """Return the parts of `flat`, a result of `pack(values, ...)`, in the shapes and dtypes of `values`."""
    shapes = [v.shape if v.shape.is_fully_defined() else tf.shape(v) for v in values]
    sizes = [v.shape.num_elements() or tf.size(v, tf.int64) for v in values]
    parts = tf.split(flat, sizes)
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


def _shape_code(tensor: tf.Tensor) -> Any:
    """Return a number below _CODES that tells shapes of as many elements apart; a tensor if the shape is not known."""
    if tensor.shape.is_fully_defined():
        return sum((1 + axis) * length for axis, length in enumerate(tensor.shape)) % _CODES
    shape = tf.shape(tensor, tf.int64)
    return tf.reduce_sum(shape * tf.range(1, 1 + tf.size(shape, tf.int64))) % _CODES
