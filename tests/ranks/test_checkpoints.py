"""A fit that was ended and run again equals the undisturbed one, to the bit: weights, optimizer, metrics, History."""

from __future__ import annotations

import os
import re

import pytest
from launch import Results, on_ranks

from hvdtrain.environment import EXIT_PREEMPTED

ALL_CASES = "HVDTRAIN_ALL_CASES" in os.environ
EXACT = ["case_exact", *(["case_exact_elsewhere"] if ALL_CASES else [])]


@pytest.fixture(scope="module", params=[1, 2] if ALL_CASES else [2])
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("checkpoints", np=request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT)
def test_ended_at_any_step(results: Results, case: str) -> None:
    for found in results.of(case):
        assert {name: far for name, far in found.items() if far} == {}


@pytest.mark.slow
def test_a_job_that_is_told_to_end_saves_and_stops(results: Results) -> None:
    for found in results.of("case_preempted"):
        assert found["differences"] == [] and found["restored"]
        steps = []
        assert [trained for *_, trained in found["messages"]] == [True, False, False]
        for message, code, written, _ in found["messages"]:
            assert code == EXIT_PREEMPTED
            steps.append(int(re.search(r"after (\d+) steps", message)[1]))
            assert f"step-{steps[-1]:09}" in written, "when a rank ends, rank 0 has written"
        assert steps[0] == 7, "in the first validation, whose second batch was not evaluated"
        # The ranks look once a second, and a step takes milliseconds.
        assert 9 <= steps[1] < 42 and steps[2] > steps[1]


@pytest.mark.slow
def test_other_data_than_arrays(results: Results) -> None:
    for found in results.of("case_data"):
        assert {name: far for name, far in found.items() if far} == {}


def test_data_that_does_not_come_again_is_refused(results: Results) -> None:
    for found in results.of("case_data_has_changed"):
        assert "does not yield the same batches as before" in found["other order"]
        assert "training data that comes in the same order" in found["live"]
        assert "cannot be read a second time: pass the function that creates it" in found["live"]


@pytest.mark.slow
def test_several_steps_at_once_with_warm_up(results: Results) -> None:
    for found in results.of("case_steps_per_execution"):
        assert found == []


@pytest.mark.slow
def test_a_finished_run_and_more_epochs(results: Results) -> None:
    for found in results.of("case_more_epochs"):
        assert found.pop("steps of the saved model") == 2 * 7 + 2
        assert found == {"again": [], "longer": [], "finished": []}


@pytest.mark.slow
def test_what_has_changed_is_named(results: Results) -> None:
    for found in results.of("case_refused"):
        assert "the shapes of seeds, statistics and metrics" in found["model"]
        assert "optimizer: 'Adam' before, 'SGD' now" in found["optimizer"]
        assert "average" in found["state"]
        assert "seed: 0 before, 5 now" in found["seed"]
        assert "resume='never'" in found["never"]
        assert "resume='must'" in found["must"]
