"""Trainer(on_nan=...) on two ranks: who is named, and what the training becomes without the batch."""

from __future__ import annotations

import json

import pytest
from launch import Results, on_ranks


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("diverged", np=2, controller="mpi")


@pytest.mark.slow
def test_stopped(results: Results) -> None:
    for found in results.of("case_stopped"):
        # Of two steps at once the second is told, and after it the weights of both ranks are nan.
        several = found.pop("several steps")
        assert several.startswith("the loss became nan in step 4 of epoch 1 on rank 0")
        for message in found.values():
            assert message.startswith("the loss became nan in step 3 of epoch 1 on rank 1")
            assert (
                "which had examples 20, 21, 22, 23 of the data, and training has stopped" in message
            )


@pytest.mark.slow
def test_skipped(results: Results) -> None:
    first, second = results.of("case_skipped")
    for name, found in first.items():
        # Sums over two ranks in another order; the normalization divides by a small variance.
        assert found["weights"] < (1e-5 if name == "statistics" else 1e-6), name
        assert found.get("history", 0.0) < 1e-5, name
        told = [one for one in found["told"] if "on_nan='skip'" in one]
        assert len(told) == 2, (name, found["told"])  # In each epoch.
        assert all("One step was skipped" in one for one in told), name
    assert "the loss became nan in step 3 of epoch 1" in first["data parallel"]["told"][0].lower()
    assert all("skip" not in one for found in second.values() for one in found["told"])


def test_a_nan_in_what_an_idle_rank_runs_the_step_with(results: Results) -> None:
    for found in results.of("case_filler"):
        assert found["weights"] < 1e-6


def test_nothing_but_skipped_steps_ends(results: Results) -> None:
    for message in results.of("case_skipped_until_the_end"):
        assert "steps were all skipped (on_nan='skip'): training has stopped" in message


@pytest.mark.slow
def test_rewound(results: Results) -> None:
    for rank in results.of("case_rewound"):
        for name, found in rank.items():
            # Sums over two ranks in another order.
            assert found["weights"] < 1e-6, name
            assert found["loss"] < 1e-5, name
            assert found["mae"] < 1e-5, name
            (line,) = found["file"].splitlines()
            named = json.loads(line)
            assert (named["epoch"], named["step"], named["loss"]) == (2, 3, "nan")


@pytest.mark.slow
def test_rewound_in_vain(results: Results) -> None:
    for without, again in results.of("case_rewound_in_vain"):
        assert "there is no checkpoint to go back to (on_nan='rewind')" in without
        assert "again after 3 returns to the checkpoint of step 5" in again
