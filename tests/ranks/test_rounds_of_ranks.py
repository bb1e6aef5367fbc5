"""Ranks that train alone for some steps, in one launch: what a Trainer makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from launch import on_ranks


@pytest.mark.slow
def test_rounds() -> None:
    first, second = on_ranks("rounds", np=2, controller="mpi").of("case_all")
    for found in (first, second):
        assert found["as synchronous"] < 1e-6
        assert found["evaluated"] < 1e-5, "the model in the file is the one that was evaluated"
        assert found["resumed"] == [] and found["compressed"] == [False]
        assert "sync: no rank holds the averaged model between rounds" in found["refused"]
    assert first["history"] == second["history"]
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert np.array_equal(one, other)
