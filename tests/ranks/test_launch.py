"""The launcher and the pools of these tests: results of all ranks, errors that show, nothing left behind."""

import os

import pytest
from launch import MPI_OR_SLOW_GLOO, on_ranks


@pytest.mark.parametrize("controller", MPI_OR_SLOW_GLOO)
def test_results_of_all_ranks(controller: str) -> None:
    results = on_ranks("hello", np=2, controller=controller)
    assert results.of("case_size") == [[0, 2], [1, 2]]
    assert results.of("case_sum") == [3.0, 3.0]
    assert results.of("case_one_rank_fails") == [None, None]
    assert results.ran("case_sum").broken == ""


@pytest.fixture(scope="module")
def processes() -> list[int]:
    return on_ranks("hello").of("case_process")


def test_ranks_stay_and_nothing_else(processes: list[int]) -> None:
    results = on_ranks("hello")
    results.of("case_disorder")
    assert results.of("case_order") == [[None, "float32", "dense", [0], "new"]] * 2
    assert results.of("case_process") == processes


@pytest.mark.slow
def test_a_case_that_hangs_is_named_and_the_next_has_new_ranks() -> None:
    hangs = on_ranks("hello", controller="gloo", timeout=2)
    said = r"case_one_rank_hangs failed\n(.|\n)*rank 1: did not end: still running after 2 s"
    with pytest.raises(pytest.fail.Exception, match=said):
        hangs.of("case_one_rank_hangs")
    fails = on_ranks("hello", controller="gloo", env={"FAILS": "1"})
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: Traceback(.|\n)*this rank fails"):
        fails.of("case_one_rank_fails")
    assert fails.ran("case_one_rank_fails").broken


def test_references_are_computed_once_and_compared_here() -> None:
    first, second = on_ranks("hello").of("case_compared")
    assert (first["array"], second["array"]) == (2.0, 3.0)
    assert first["history"] == second["history"] == 0.25
    assert first["computed by"] == second["computed by"] != os.getpid()
    # Once a session.
    again = on_ranks("hello").of("case_compared")
    assert again == [first, second]
