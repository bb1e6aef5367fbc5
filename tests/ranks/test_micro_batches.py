"""Micro-batches without pipeline stages: the result of plain Keras with the whole batch."""

from __future__ import annotations

import pytest
from launch import Results, on_ranks
from test_pipeline import EXACT, check_values


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("micro_batches")
    return on_ranks("micro_batches", np=2, env={"FOLDER": str(folder)})


@pytest.mark.slow
def test_weights_of_examples_penalties_and_one_norm(two: Results) -> None:
    ranks = two.of("case_adam")
    check_values(ranks)
    assert all(one["held"] == one["whole"] for one in ranks)


@pytest.mark.slow
def test_a_mean_over_the_words_of_all_micro_batches(two: Results) -> None:
    check_values(two.of("case_padding"))


@pytest.mark.slow
def test_a_sharded_optimizer(two: Results) -> None:
    check_values(two.of("case_sharded_optimizer"))


@pytest.mark.slow
def test_split_layers() -> None:
    env = {"TEST_MESHES": "2,2,1", "FOLDER": ""}
    check_values(on_ranks("micro_batches", np=4, env=env).of("case_split_layers"))


@pytest.mark.slow
def test_the_rank_with_least_memory_decides_on_their_number(two: Results) -> None:
    first, second = two.of("case_auto")
    assert first.pop("said") == ['micro_batches="auto": shares are computed in 4 micro-batches']
    assert second.pop("said") == []
    check_values([first, second])


def test_an_optimizer_that_is_distributed_already(two: Results) -> None:
    assert two.of("case_distributed_optimizer") == [0.0, 0.0]


def test_the_users_model_is_trained(two: Results) -> None:
    first, second = two.of("case_the_users_model")
    for found in (first, second):
        assert found["same"] and found["moved"] > 0 == found["loaded"]
        assert found["predicts"] <= EXACT
    assert first["sums"] == second["sums"]


def test_what_cannot_work_is_refused(two: Results) -> None:
    for found in two.of("case_refused"):
        assert "it is a subclassed model" in found["subclass"]
        assert "micro-batches" in found["jit"] and "jit_compile" in found["jit"]
        assert "'skip' does not work" in found["skip"]
