"""Tensors that are one vector for a collective: their values, and lengths that differ where their shapes do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.collectives.packing import as_one

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=2, max_size=5)


def length_of(shapes: Sequence[Sequence[int]], known: bool = True) -> int:
    """Return the length of the vector of tensors of these shapes, whose values must come back."""
    lengths: list[int] = []
    values = [
        np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape) for shape in shapes
    ]

    def collective(flat: tf.Tensor) -> tf.Tensor:
        tf.py_function(lambda found: lengths.append(int(found)), [tf.size(flat)], [])
        return 2.0 * flat

    def twice(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return as_one(tensors, collective)

    specs = [tf.TensorSpec(v.shape if known else None, tf.float32) for v in values]
    found = tf.function(twice, input_signature=specs, autograph=False)(*map(tf.constant, values))
    for value, result in zip(values, found, strict=True):
        np.testing.assert_array_equal(result, 2 * value)
    return lengths[0]


@given(SHAPES)
def test_ranks_that_know_less_of_the_shapes_send_as_much(shapes: list[list[int]]) -> None:
    assert length_of(shapes) == length_of(shapes, known=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Of as many elements.
        ([[2, 3], [4]], [[3, 2], [4]]),
        ([[2], [3]], [[3], [2]]),
        ([[6], [1]], [[2, 3], [1]]),
        # Of dense layers that differ by one unit.
        ([[46, 18], [18], [18, 1], [1]], [[46, 19], [19], [19, 1], [1]]),
    ],
)
def test_other_shapes_have_another_length(one: list[list[int]], other: list[list[int]]) -> None:
    assert length_of(one) != length_of(other)


def test_wider_layers_have_other_lengths() -> None:
    """No width is taken for one of the next 100."""
    found = [length_of([[46, h], [h], [h, 1], [1]]) for h in range(1, 102)]
    assert len(set(found)) == len(found)


def test_each_place_counts() -> None:
    """Also of many tensors, of which one is longer and a later one shorter."""
    many = [[4]] * 130
    whole = length_of(many)
    for place in (0, 58, 59, 60, 121, 128):
        changed = [*many]
        changed[place], changed[place + 1] = [5], [3]
        assert length_of(changed) != whole, place
