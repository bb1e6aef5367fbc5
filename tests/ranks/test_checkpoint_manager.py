"""A loop of one's own goes on bit-identically on every rank, also between two updates of accumulated gradients."""

from __future__ import annotations

from launch import on_ranks


def test_it_goes_on_bit_identically() -> None:
    results = on_ranks("checkpoint_manager").of("case_goes_on")
    for found in results:
        assert (found["found"], found["different"]) == ({"step": 3}, [])
        undisturbed, resumed = found["losses"]
        assert undisturbed == resumed
    assert results[0]["losses"] != results[1]["losses"], "each rank has its own"
