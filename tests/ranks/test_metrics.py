"""Logs and metrics on 2 ranks are those of one process, or a warning names them."""

from __future__ import annotations

from typing import Any

import pytest
from launch import Results, on_ranks

EXACT = 1e-5  # As for weights: 12 steps' summation order.
LAST_BATCH_LARGEST = "largest"
"""The log of OwnNames that no average makes."""


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("metrics", np=2, timeout=600)


def far(found: dict[str, Any]) -> dict[str, float]:
    return {name: apart for name, apart in found["apart"].items() if not apart <= EXACT}


@pytest.mark.slow
def test_ranks_agree(results: Results) -> None:
    for case in ("case_logs", "case_metrics"):
        first, second = results.of(case)
        assert {n: f["history"] for n, f in first.items()} == {
            n: f["history"] for n, f in second.items()
        }


@pytest.mark.slow
def test_logs(results: Results) -> None:
    first, _ = results.of("case_logs")
    for name, found in first.items():
        warned = " ".join(found["warnings"])
        if not name.startswith("own names"):  # With one example in the last step, one rank has it.
            assert (name, far(found), warned) == (name, {}, "")
            continue
        # A value of the last batch that differs by rank: right if it is a mean, and named in any case.
        assert far(found).keys() <= {LAST_BATCH_LARGEST}
        assert "'batch_loss'" in warned and "'largest'" in warned
        assert not any(f"'{exact}'" in warned for exact in ("running", "rate", "root"))


@pytest.mark.slow
def test_metrics_that_combine(results: Results) -> None:
    first, _ = results.of("case_metrics")
    for name, found in first.items():
        if name != "inexact":
            assert (name, far(found), found["warnings"]) == (name, {}, [])


@pytest.mark.slow
def test_a_metric_that_does_not_combine_is_named(results: Results) -> None:
    first, second = results.of("case_metrics")
    (warning,) = first["inexact"]["warnings"]
    assert "'ratio'" in warning and "on one worker" in warning
    assert not second["inexact"]["warnings"]
    assert far(first["inexact"]).keys() == {"ratio", "val_ratio"}


def test_other_rules_on_another_rank(results: Results) -> None:
    for message in results.of("case_other_rules"):
        assert "so their states cannot be combined" in message


def test_counter_of_a_layer(results: Results) -> None:
    assert results.of("case_counter_of_a_layer") == [[12.0], [12.0]]


def test_model_fit_merges_the_metrics_of_keras(results: Results) -> None:
    for found in results.of("case_model_fit"):
        assert found.pop("steps") == 2.0  # The mean of a metric of the user's own.
        assert max(found.values()) <= EXACT
