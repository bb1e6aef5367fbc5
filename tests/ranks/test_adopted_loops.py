"""`hvdtrain run --adopt`: training loops of a script's own, on two ranks beside one plain process."""

from __future__ import annotations

from typing import Any

import pytest
from launch import on_ranks

SHARED = "2 workers share each batch of 32"
NO_SUM = "the gradients of its shares do not add up to those of the whole batch"
TOLD = {
    "mean": SHARED,
    "sum": SHARED,
    "metrics_and_rows": SHARED,
    "clipped": SHARED,
    "two_networks": SHARED,
    "penalty": SHARED,
    "accumulated": SHARED,
    "embedding": SHARED,
    "alike_at_first": SHARED,
    "mean_of_some": NO_SUM,
    "asserted": SHARED,
    "padded_later": f"{NO_SUM}, once labels or padding vary",
    "batch_normalization": NO_SUM,
    "dropout": "it draws random numbers",
    "eager": "the training loop at",
    "value_decides": "a value of the batch decides what it does",
    "iterator": "no argument of it is a batch",
    "changed_in_python": "it has another result when it is traced again",
    "effects": "which may change more than variables",
}
ROUNDING = 1e-5
"""Relative: what the order of sums makes of 24 to 27 steps."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = {"LOOPS": " ".join(TOLD), "FOLDER": str(tmp_path_factory.mktemp("loops"))}
    first, second = on_ranks("adopted_loops", np=2, env=env).of("case_loops")
    return {name: (first[name], second[name]) for name in TOLD}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_a_loop_is_that_of_one_process(found: dict[str, Any], name: str) -> None:
    for rank in found[name]:
        assert rank["weights"] < ROUNDING and rank["results"] < ROUNDING
    assert any(TOLD[name] in line for line in found[name][0]["told"])
    if TOLD[name] != SHARED:
        assert not any(SHARED in line for line in found[name][0]["told"])
