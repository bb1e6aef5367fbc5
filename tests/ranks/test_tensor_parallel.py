"""Tensor parallelism on real ranks: 4 of them, as 2 x 2 and as 4, against the whole model in one process."""

from __future__ import annotations

import pytest
from launch import Results, on_ranks

pytestmark = pytest.mark.slow
EXACT = 1e-5
MESHES = {"TEST_MESHES": "2,2,1;1,4,1"}


@pytest.fixture(scope="module")
def results() -> Results:
    """Over Gloo; test_pipeline and test_saving train split layers over MPI."""
    return on_ranks("tensor_parallel", np=4, controller="gloo", env=MESHES)


@pytest.fixture
def common(results: Results) -> list[dict]:
    return results.of("case_what_ranks_have_in_common")


def assert_close(found: dict, limit: float = EXACT) -> None:
    flat = {
        f"{name} {part}": value
        for name, values in found.items()
        for part, value in (values if isinstance(values, dict) else {"": values}).items()
    }
    assert flat
    assert not {name: value for name, value in flat.items() if not value <= limit}


def test_forward_and_every_gradient(results: Results) -> None:
    for rank in results.of("case_forward_and_gradients"):
        assert set(rank) == {"2x2", "4"}
        assert all(len(found) == 3 + 26 for found in rank.values())
        assert_close(rank)


def test_only_a_gated_mlp_stays_split_and_ranks_hold_their_parts(results: Results) -> None:
    for rank in results.of("case_what_stays_split"):
        assert rank["up"] is rank["gate"] is False and rank["down"] is True
        assert rank["wide"] is True and rank["lone"] is False
        sizes = rank["sizes"]
        assert sizes["words/embeddings"] == 24 * 8 / 4
        assert sizes["attention/query/kernel"] == 8 * 4 * 3 / 4
        assert sizes["attention/attention_output/bias"] == 8
        assert sizes["down/kernel"] == 16 * 8 / 4


def test_trains_as_one_process_with_the_whole_model(results: Results) -> None:
    for rank in results.of("case_training"):
        assert set(rank) == {"sgd hybrid", "adamw tensor"}
        assert_close(rank)


def test_no_rank_takes_a_step_if_one_has_an_inf(common: list[dict]) -> None:
    assert [rank["finite"] for rank in common] == [False] * 4


def test_the_guard_compares_those_that_hold_the_same(common: list[dict]) -> None:
    for number, rank in enumerate(common):
        said = rank["said"]
        assert said["before"] == said["whole broadcast"] == said["part broadcast"] == ""
        assert "down/bias' of rank 3 differs from that of ranks 0, 1, 2" in said["whole"]
        # Ranks 0 and 2 hold the other part, and find nothing.
        if number in (1, 3):
            assert "up/kernel' of rank 3 differs from that of rank 1" in said["part"]
        else:
            assert said["part"] == ""


def test_statistics_are_averaged_and_seeds_kept_apart_over_the_data(common: list[dict]) -> None:
    assert all(rank["mean"] <= EXACT < rank["largest"] for rank in common)
    seeds = [rank["seed"] for rank in common]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_the_state_of_split_layers_may_be_sharded_over_the_data(results: Results) -> None:
    assert max(results.of("case_sharded_state_of_split_layers")) <= EXACT


def test_what_cannot_be_is_said(results: Results) -> None:
    for rank in results.of("case_errors"):
        assert "Lamb cannot train split layers: it scales each step by the norm" in rank["lamb"]
        assert "needs at least 8 ranks, but the job has 4" in rank["ranks"]
        assert "The gradients of the parts of a batch do not add up" in rank["whole batch"]


def test_layers_by_hand(results: Results) -> None:
    for rank in results.of("case_by_hand"):
        assert_close({name: v for name, v in rank.items() if name.startswith("float32")})
        # One digit of bfloat16 has 8 bits; the outputs are up to 3.
        assert_close({name: v for name, v in rank.items() if "bfloat16" in name}, 0.04)


def test_grouped_attention(results: Results) -> None:
    for rank in results.of("case_grouped_attention"):
        assert_close(rank)


def test_a_word_that_no_rank_holds_is_an_error(results: Results) -> None:
    assert all("is not in [0, 24)" in message for message in results.of("case_unknown_word"))
