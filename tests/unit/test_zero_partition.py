"""Which elements of a variable a rank's part has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.collectives.packing import bounded_groups
from hvdtrain.parallel.zero.reducer import Partition


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(1, 9))
def test_parts_are_the_variable_once_and_of_nearly_one_size(shape: list[int], count: int) -> None:
    parts = [Partition(tuple(shape), index, count) for index in range(count)]
    flat = np.arange(np.prod(shape, dtype=int))
    assert np.concatenate([part.of(flat) for part in parts]).tolist() == flat.tolist()
    sizes = [part.size for part in parts]
    assert [len(part.of(flat)) for part in parts] == sizes
    # Horovod's reducescatter gives the longer ones to the first ranks.
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([9], [[9]]),
        ([2, 2, 1, 3, 2], [[2, 2, 1], [3, 2]]),
        ([1, 9, 1, 1], [[1], [9], [1, 1]]),
    ],
)
def test_what_travels_together_is_bounded(sizes: list[int], groups: list[list[int]]) -> None:
    assert bounded_groups(sizes, int, 5) == groups
