"""A fit goes on in other layouts and on other numbers of ranks along the same trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import Results, on_ranks

ROUNDING = 1e-5
"""What the order of summation may change in weights of about 1: 40 steps of float32."""


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("resumed_layouts", np=2)


def require_near(found: Any) -> None:
    assert found["weights"] < ROUNDING and found["history"] < ROUNDING, found
    assert found["batches"] == found["all"]


@pytest.mark.slow
def test_from_layout_to_layout_within_epochs(results: Results) -> None:
    for found in results.of("case_other_layouts"):
        require_near(found)


@pytest.mark.slow
def test_weights_that_a_callback_keeps_stay_in_their_layout(results: Results) -> None:
    for found in results.of("case_best_weights"):
        assert "best weights of the callback EarlyStopping" in found


@pytest.mark.slow
def test_other_numbers_of_ranks_within_epochs(tmp_path: Path) -> None:
    """4, 2, then 3 ranks: the same examples in the same order."""
    for ranks, end_at in ((4, 10), (2, 9), (3, 0)):
        env = {"RESUMED_RUN_DIR": str(tmp_path), "RESUMED_END_AT": str(end_at)}
        found = on_ranks("resumed_layouts", np=ranks, env=env).of("case_other_numbers")
    for one in found:
        require_near(one)
