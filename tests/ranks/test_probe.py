"""What parts of a batch add up to, on 2 ranks over MPI and 3 over Gloo, against plain Keras with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from launch import Results, on_ranks

EXACT = 1e-5
"""Contract 2's limit over 30 steps; one rounding of a sum a step is 1e-7."""


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("adding_up", np=2)


def check(results: Results, case: str) -> None:
    check_all(results.of(case))


def check_all(everyone: list[dict[str, Any]]) -> None:
    for found in everyone:
        far = {
            f"{name} {key}": value
            for name, one in found.items()
            for key, value in one.items()
            if key != "histories" and not value <= EXACT
        }
        assert not far


@pytest.mark.slow
def test_sums(results: Results) -> None:
    check(results, "case_sums")


@pytest.mark.slow
def test_evaluated_before_training(results: Results) -> None:
    check(results, "case_evaluated_first")


@pytest.mark.slow
def test_slices(results: Results) -> None:
    check(results, "case_slices")


@pytest.mark.slow
def test_state_without_gradients(results: Results) -> None:
    check(results, "case_state_without_gradients")


@pytest.mark.slow
def test_a_loss_over_all_examples(results: Results) -> None:
    first, other = results.of("case_gathered")
    check_all([first["far"], other["far"]])
    assert not other["told"]
    assert ["a collective is called" in told for told in first["told"]] == [True]


@pytest.mark.slow
def test_several_idle_ranks() -> None:
    three = on_ranks("adding_up", np=3, controller="gloo")
    check(three, "case_state_without_gradients")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "accumulated", "sharded"])
def test_overflow(results: Results, way: str) -> None:
    for found in (each[way] for each in results.of("case_overflow")):
        # The same steps are skipped: scale, its counter and the iterations are equal, and some were skipped.
        assert found["optimizer"] == 0.0
        assert 10 <= found["iterations"] < 40
        # 11 bits: 40 steps at rate 0.05 of gradients of up to 60.
        assert found["weights"] <= 40 * 0.05 * 60 * 2.0**-11


def test_one_loss_for_two_trainers(results: Results) -> None:
    for found in results.of("case_one_loss_for_two_trainers"):
        assert found == {"0": 0.0, "1": 0.0}


def test_refused(results: Results) -> None:
    for found in results.of("case_refused"):
        for name in ("contrastive", "few examples"):
            assert "looks at several examples at once" in found[name]
        assert "sums over the examples: let it take the mean" in found["sum in a step"]
        assert found["trained"] == "True"
