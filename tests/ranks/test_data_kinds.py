"""Two ranks on data that comes in many ways, as plain Keras in one process."""

from __future__ import annotations

import pytest
from launch import Results, on_ranks

EXACT = 1e-5
"""The order of float32 sums over 12 steps, of losses up to 5."""


@pytest.fixture(scope="module")
def two() -> Results:
    return on_ranks("data_kinds", np=2)


@pytest.mark.slow
def test_equals_one_process(two: Results) -> None:
    for found in two.of("case_kinds"):
        far = {(kind, what): v for kind, one in found.items() for what, v in one.items()}
        assert {key: value for key, value in far.items() if not value <= EXACT} == {}


def test_predictions_of_other_lengths(two: Results) -> None:
    for found in two.of("case_predictions"):
        assert found == {"same": True, "shape": [17, None, 2]}


def test_predictions_that_depend_on_the_batch_are_named(two: Results) -> None:
    first, second = two.of("case_predictions_that_depend_on_the_batch")
    assert first.pop("none") == []
    for name, kind in (("step", "Centred"), ("layer", "Sequential")):
        (warning,) = first[name]
        assert f"what {kind} returns for an example depends on the other" in warning
    assert not any(second.values())
