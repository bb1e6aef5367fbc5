"""N workers equal one: Trainer on 1, 2 (MPI) and 3 ranks (Gloo) against plain Keras with the whole batch.

EXACT is contract 2's limit: 30 steps, of which every sixth has idle ranks. Adam and AdamW are held to the
same, although they could honestly miss it: they divide by the root of the second moment, so that an entry whose
gradient is all rounding moves by up to the learning rate, 1e-3, in the direction of its rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from launch import Results, on_ranks

EXACT = 1e-5
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def two() -> Results:
    return on_ranks("trainer_exact", np=2)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.all_cases), 2, pytest.param(3, marks=SLOW)],
)
def results(request: pytest.FixtureRequest, two: Results) -> Results:
    if request.param == 2:
        return two
    controller = "gloo" if request.param == 3 else "mpi"
    return on_ranks("trainer_exact", np=request.param, controller=controller)


def check(found: dict[str, Any], **limits: float) -> None:
    far = {
        name: value
        for name, value in found.items()
        if name != "histories" and not value <= limits.get(name, EXACT)
    }
    assert not far


def check_same_history(ranks: list[Any]) -> None:
    assert all(found["histories"] == ranks[0]["histories"] for found in ranks)


@pytest.mark.parametrize("case", ["case_sgd", pytest.param("case_adam", marks=pytest.mark.slow)])
def test_optimizers(results: Results, case: str) -> None:
    ranks = results.of(case)
    for found in ranks:
        check(found)
    check_same_history(ranks)


@pytest.mark.slow
def test_losses(results: Results) -> None:
    for found in results.of("case_losses"):
        for name, one in found.items():
            check({f"{name} {key}": value for key, value in one.items() if key != "histories"})


def test_synchronized_normalization(results: Results) -> None:
    for found in results.of("case_synchronized_normalization"):
        check(found)


def test_numpy(results: Results) -> None:
    for found in results.of("case_numpy"):
        check(found)


@pytest.mark.slow
def test_two_outputs(results: Results) -> None:
    ranks = results.of("case_two_outputs")
    for found in ranks:
        check(found)
    check_same_history(ranks)


@pytest.mark.slow
def test_adamw_with_class_weights(two: Results) -> None:
    for found in two.of("case_adamw"):
        check(found)


def test_statistics_without_synchronization(two: Results) -> None:
    # What one process has: momentum 0 keeps the last batch only, and the tail's one example is 1e6. Rank 0, idle
    # there, takes over what rank 1 came to; its filler is forgotten.
    ranks = two.of("case_ordinary_normalization")
    assert ranks[0] == ranks[1] == [1e6, -1e6]


def test_shuffled(two: Results) -> None:
    assert max(two.of("case_shuffled")) <= EXACT


@pytest.mark.slow
def test_sources(two: Results) -> None:
    for found in two.of("case_sources"):
        for name, one in found.items():
            check({f"{name} {key}": value for key, value in one.items()})


def test_validation_split(two: Results) -> None:
    for found in two.of("case_validation_split"):
        check(found)


@pytest.mark.slow
def test_ways_of_running(two: Results) -> None:
    for found in two.of("case_ways_of_running"):
        for name, one in found.items():
            check({f"{name} {key}": v for key, v in one.items() if key != "histories"})


def test_precision(two: Results) -> None:
    for found in two.of("case_precision"):
        # 8 and 11 bits: 12 steps at rate 0.05 of gradients of about 1.
        assert found["mixed_bfloat16"]["weights"] <= 12 * 0.05 * 2.0**-8
        assert found["mixed_float16"]["weights"] <= 12 * 0.05 * 2.0**-11
        assert {one["predictions"] for one in found.values()} == {81}


def test_seeds(two: Results) -> None:
    first, second = two.of("case_seeds")
    assert first["start"] == second["start"]
    assert first["mask"] != second["mask"]


def test_fit_again(two: Results) -> None:
    for found in two.of("case_fit_again"):
        check(found)


def test_fit_again_while_gradients_wait(two: Results) -> None:
    for found in two.of("case_fit_again_while_gradients_wait"):
        check(found)


@pytest.mark.slow
def test_metric_of_each_class(two: Results) -> None:
    for found in two.of("case_metric_of_each_class"):
        assert found.pop("classes") == 5
        assert found.pop("one") == 1, "an array in Keras as well"
        check(found.pop("single"))
        check(found)
