"""The launcher and the pools of these tests: results of all ranks, errors that show, nothing left behind."""

import os

import pytest
from launch import CONTROLLERS, run_cases


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_results_of_all_ranks(controller: str) -> None:
    cases = ["case_size", "case_sum", "case_one_rank_fails"]
    results = run_cases("hello", np=2, controller=controller, only=cases)
    assert results.of("case_size") == [[0, 2], [1, 2]]
    assert results.of("case_sum") == [3.0, 3.0]
    assert results.of("case_one_rank_fails") == [None, None]
    assert results.launched.returncode == 0


@pytest.fixture(scope="module")
def processes() -> list[int]:
    return run_cases("hello", only=["case_process"]).of("case_process")


def test_ranks_stay_and_nothing_else(processes: list[int]) -> None:
    results = run_cases("hello", only=["case_disorder", "case_order", "case_process"])
    assert results.of("case_process") == processes
    assert results.of("case_order") == [[None, "float32", "dense", [0], "new"]] * 2


def test_a_case_that_hangs_is_named_and_the_next_has_new_ranks() -> None:
    hangs = run_cases("hello", controller="gloo", only=["case_one_rank_hangs"], timeout=2)
    said = r"case_one_rank_hangs failed\n(.|\n)*rank 1: did not end: still running after 2 s"
    with pytest.raises(pytest.fail.Exception, match=said):
        hangs.of("case_one_rank_hangs")
    fails = run_cases("hello", controller="gloo", only=["case_one_rank_fails"], env={"FAILS": "1"})
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: Traceback(.|\n)*this rank fails"):
        fails.of("case_one_rank_fails")
    assert fails.launched.returncode != 0


def test_references_are_computed_once_and_compared_here() -> None:
    first, second = run_cases("hello", only=["case_compared"]).of("case_compared")
    assert (first["array"], second["array"]) == (2.0, 3.0)
    assert first["history"] == second["history"] == 0.25
    assert first["computed by"] == second["computed by"] != os.getpid()
    # Once a session.
    again = run_cases("hello", only=["case_compared"]).of("case_compared")
    assert again == [first, second]
