"""Where the examples of a global batch go on several replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.strategies.rows import place


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int]:
    replicas, rows = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    return draw(st.integers(1, replicas * rows)), replicas, rows


@given(batches())
def test_each_example_counts_once_and_in_order(batch: tuple[int, int, int]) -> None:
    examples, replicas, rows = batch
    placement = place(*batch)
    assert placement.rows.shape == placement.mask.shape == (replicas, rows)
    counted = placement.rows[placement.mask > 0]
    np.testing.assert_array_equal(counted, np.arange(examples))
    assert placement.is_full == (examples == replicas * rows)
    assert max(placement.real) - min(placement.real) <= 1


@given(batches())
def test_fillers_are_examples_of_the_replica(batch: tuple[int, int, int]) -> None:
    placement = place(*batch)
    for table, real in zip(placement.rows, placement.real, strict=True):
        assert set(table) <= set(range(batch[0]))
        if real:
            assert set(table) == set(table[:real])
            assert np.ptp(np.bincount(table - table.min())) <= 1  # In turn.


def test_an_idle_replica_has_no_part_of_averages() -> None:
    placement = place(2, 3, 4)
    assert placement.real == (0, 1, 1)
    assert placement.weights.tolist() == [0, 0.5, 0.5]
    assert place(12, 3, 4).weights.tolist() == pytest.approx([1 / 3] * 3)
