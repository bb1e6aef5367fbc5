"""The launcher of these tests: results of all ranks, and errors that show."""

import pytest
from launch import CONTROLLERS, run_cases


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_results_of_all_ranks(controller: str) -> None:
    results = run_cases("hello", np=2, controller=controller)
    assert results.of("case_size") == [[0, 2], [1, 2]]
    assert results.of("case_sum") == [3.0, 3.0]
    assert results.of("case_one_rank_fails") == [None, None]
    assert results.launched.returncode == 0


def test_a_failure_on_one_rank_fails_the_test_and_names_it() -> None:
    results = run_cases("hello", np=2, env={"FAILS": "1"})
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: Traceback(.|\n)*this rank fails"):
        results.of("case_one_rank_fails")
    assert results.launched.returncode != 0
