"""`model.fit` that was ended and goes on at the next epoch, against one that nothing has ended."""

from __future__ import annotations

import numpy as np
import pytest
from launch import on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", ["case_ended_and_resumed", "case_sharded_optimizer"])
def test_a_fit_that_was_ended_becomes_the_undisturbed_one(case: str) -> None:
    """Weights, averages and momenta, History, log, and what callbacks waited for: bit-identical on every rank."""
    for found in on_ranks("fit_checkpoints").of(case):
        undisturbed = found["undisturbed"]
        assert 4 <= len(undisturbed["epochs"]) < 6, "EarlyStopping ends it"
        resumed = found["resumed"]
        for one, same in zip(undisturbed["weights"], resumed["weights"], strict=True):
            np.testing.assert_array_equal(one, same)
        for what in ("history", "epochs", "waited", "log"):
            assert resumed[what] == undisturbed[what], what


def test_a_callback_that_one_rank_alone_has_is_named() -> None:
    """The ranks would wait for each other."""
    for said in on_ranks("fit_checkpoints").of("case_on_one_rank_only"):
        assert len(said) == 2
        for name, text in zip(("CheckpointCallback", "MetricAverageCallback"), said, strict=True):
            assert "what must be among the callbacks of every rank" in text and name in text
