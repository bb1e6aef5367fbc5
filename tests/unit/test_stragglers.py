"""Which rank the others wait for, from the seconds that each spent outside of steps."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.trainer.stragglers import Straggler, StragglerWatch, find_straggler
from hvdtrain.worker.heartbeat import beat, in_phase, own_seconds


@pytest.mark.parametrize(
    ("outside", "epoch_seconds", "found"),
    [
        # input, callbacks, saving of each rank.
        ([[0, 0.25, 0], [0, 2.25, 0]], 10, Straggler(1, "callbacks", 2.25, 0.25, 10, 2)),
        ([[3, 1, 0], [0.5, 1, 0], [0.75, 1, 0]], 20, Straggler(0, "input", 3, 0.75, 20, 2.25)),
        ([[0, 0, 4], [0, 1, 0], [0, 1, 0], [0, 1, 0]], 20, Straggler(0, "saving", 4, 0, 20, 3)),
        ([[9, 9, 9], [9, 9, 9]], 30, None),  # All are slow: nobody waits.
        ([[0.1, 0.2, 0], [0.1, 0.5, 0]], 10, None),  # 3 % of the epoch.
        ([[0, 0, 0], [0, 0, 0]], 0, None),
    ],
)
def test_the_rank_that_loses_the_others_time(
    outside: list[list[float]], epoch_seconds: float, found: Straggler | None
) -> None:
    assert find_straggler(np.array(outside, float), epoch_seconds) == found


class OfRanks:
    """A communicator of two ranks, each of which gathers `times`: (ranks, seconds of COLUMNS after "steps")."""

    def __init__(self) -> None:
        self.times = np.zeros((2, 5))

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allgather(self, _: np.ndarray, name: str) -> Any:
        return SimpleNamespace(numpy=lambda: self.times)

    def exchange(self, value: str, name: str) -> list[str]:
        return [value, "node2"]


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ([0.5] * 6, [4]),  # Two seconds in a row, and once.
        ([3, 3, 3], [2]),  # Never after one epoch alone.
        ([0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5], []),  # The row was broken.
        ([0.3] * 6, []),  # 1.8 s in all: of short epochs.
        ([0.04] * 60, []),  # 4 % of each epoch.
    ],
)
def test_a_rank_is_named_when_it_cost_seconds_in_a_row(lost: list[float], named: list[int]) -> None:
    ranks = OfRanks()
    watch = StragglerWatch(cast(Communicator, ranks))
    warned = []
    for epoch, seconds in enumerate(lost):
        ranks.times[1, 2], ranks.times[:, -1] = seconds, 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.look(epoch)
        warned += [epoch + 1] * len(caught)
        assert all("Rank 1 (host node2) slows the others down" in str(w.message) for w in caught)
    assert warned == named


def test_time_that_is_waited_in_a_collective_is_not_a_ranks_own() -> None:
    begin, before = time.monotonic(), own_seconds()
    beat("callbacks")
    time.sleep(0.05)
    with in_phase("callbacks", "sum", waiting=True):
        time.sleep(0.2)
    with in_phase("saving"):
        time.sleep(0.05)
    beat("input")
    after, passed = own_seconds(), time.monotonic() - begin
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in after.items()}
    # A busy machine makes sleeps longer, never shorter.
    assert spent["callbacks"] >= 0.05
    assert spent["saving"] >= 0.05
    assert sum(spent.values()) <= passed - 0.2 + 1e-6  # Rounding of sums.
