"""A loop of one's own goes on bit-identically on every rank, also between two updates of accumulated gradients."""

from __future__ import annotations

import numpy as np
import pytest
from launch import on_ranks


@pytest.mark.parametrize("case", ["case_goes_on", "case_goes_on_sharded"])
def test_it_goes_on_bit_identically(case: str) -> None:
    results = on_ranks("checkpoint_manager").of(case)
    for found in results:
        assert (found["found"], found["different"]) == ({"step": 3}, [])
        undisturbed, resumed = found["losses"]
        assert undisturbed == resumed
    assert results[0]["losses"] != results[1]["losses"], "each rank has its own"


@pytest.mark.slow
def test_a_sharded_optimizer_of_two_ranks_goes_on_as_one() -> None:
    folder, weights = on_ranks("checkpoint_manager").of("case_saved_by_two")[0]
    one = on_ranks("checkpoint_manager", np=1, env={"SAVED_BY_TWO": folder})
    (resumed,) = one.of("case_resumed_by_one")
    for variable, expected in zip(resumed, weights, strict=True):
        # The mean over the batch is summed in another order, and Adam divides by its root: 1e-5.
        np.testing.assert_allclose(variable, expected, rtol=0, atol=1e-5)
