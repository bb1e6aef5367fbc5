"""`model.fit` that was ended and goes on at the next epoch, against one that nothing has ended."""

from __future__ import annotations

import numpy as np
from launch import on_ranks


def test_a_fit_that_was_ended_becomes_the_undisturbed_one() -> None:
    """Weights, averages and momenta, History, log, and what callbacks waited for: bit-identical on every rank."""
    for found in on_ranks("fit_checkpoints").of("case_ended_and_resumed"):
        undisturbed = found["undisturbed"]
        assert 4 <= len(undisturbed["epochs"]) < 6, "EarlyStopping ends it"
        for way in ("resumed", "again"):
            for one, same in zip(undisturbed["weights"], found[way]["weights"], strict=True):
                np.testing.assert_array_equal(one, same)
            for what in ("history", "epochs", "waited", "log"):
                assert found[way][what] == undisturbed[what], (way, what)
