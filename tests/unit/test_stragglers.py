"""Which rank the others wait for, from the seconds that each spent outside of steps."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.trainer.stragglers import Straggler, find_straggler
from hvdtrain.worker.heartbeat import beat, in_phase, own_seconds


@pytest.mark.parametrize(
    ("outside", "epoch_seconds", "found"),
    [
        # input, callbacks, saving of each rank.
        ([[0.1, 0.2, 0], [0.1, 2.2, 0]], 10, Straggler(1, "callbacks", 2.2, 0.2, 10)),
        ([[3, 1, 0], [0.5, 1, 0], [0.7, 1, 0]], 20, Straggler(0, "input", 3, 0.7, 20)),
        ([[0, 0, 4], [0, 1, 0], [0, 1, 0], [0, 1, 0]], 20, Straggler(0, "saving", 4, 0, 20)),
        ([[9, 9, 9], [9, 9, 9]], 30, None),  # All are slow: nobody waits.
        ([[0.1, 0.2, 0], [0.1, 0.5, 0]], 10, None),  # 3 % of the epoch.
        ([[0, 0, 0], [0, 0.09, 0]], 0.1, None),  # Too short to tell from noise.
    ],
)
def test_the_rank_that_loses_the_others_time(
    outside: list[list[float]], epoch_seconds: float, found: Straggler | None
) -> None:
    assert find_straggler(np.array(outside, float), epoch_seconds) == found


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
