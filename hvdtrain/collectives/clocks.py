"""How far the clocks of the ranks' machines are apart.

No rank leaves a collective before all have entered it. So what another rank's clock showed when it entered, and when it
left, bounds its difference from this rank's clock on both sides, however long messages take. Each of several rounds
gives such bounds. The estimate is the middle of the closest ones, and its error at most half of their distance, which
is about the duration of the quickest round. Ranks of one machine share its clock.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator

ROUNDS = 20
"""Number of collectives; the first ones are negotiated, and take longer."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_offsets(ranks: Communicator = ALL_RANKS) -> list[tuple[int, int]]:
    """Return for each rank by how much its `time.time_ns` is ahead of rank 0's, and the error, in ns. A collective."""
    readings = np.zeros((ROUNDS, 2), np.int64)
    for row in readings:
        row[0] = time.time_ns()
        ranks.allreduce(np.zeros(1, np.float32), "hvdtrain_clock").numpy()
        row[1] = time.time_ns()
    machine = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(uuid.uuid4())
    machines, everyones = zip(*ranks.exchange([machine, readings], "clocks"), strict=True)
    return offsets_of(machines, everyones)


def offsets_of(machines: Sequence[str], readings: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Return what `clock_offsets` does.

    Args:
        machines: Identifier of each rank's machine.
        readings: Each rank's clock in ns at the beginning and the end of each round, of shape (rounds, 2).
    """
    first = readings[0]
    bounds: dict[str, tuple[int, int]] = {}
    for machine, own in zip(machines, readings, strict=True):
        low, high = int((own[:, 0] - first[:, 1]).max()), int((own[:, 1] - first[:, 0]).min())
        known = bounds.get(machine, (low, high))
        bounds[machine] = max(low, known[0]), min(high, known[1])
    bounds[machines[0]] = 0, 0
    # A clock that was set between two rounds leaves bounds that contradict each other.
    found = (bounds[machine] for machine in machines)
    return [((low + high) // 2, abs(high - low) // 2) for low, high in found]
