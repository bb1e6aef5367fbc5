"""Finds the rank that the others wait for, from the time that each rank spends outside of training steps.

A step ends on all ranks together, when its gradients are reduced. The time that one rank spends between two steps
beyond that of the others (on its data, in a callback, on a slow disk) is lost to all of them.

A rank that is slow within the step itself is not found: for that, one would have to know when its local gradients are
ready, before the first collective. But a GPU runs asynchronously, so the host would have to wait for it in every step.
Horovod's timeline shows that time: with `hvdtrain run --timeline-filename FILE`, each tensor's NEGOTIATE has a mark
when a rank is ready.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.errors import warn_user
from hvdtrain.worker.heartbeat import Phase, own_seconds

OUTSIDE: dict[Phase, tuple[str, str]] = {
    "input": (
        "waiting for data",
        "Check the input pipeline on that host: slow disk, too few threads, busy CPU?",
    ),
    "callbacks": ("in callbacks", "Check for a callback that does its work on this rank only"),
    "saving": ("saving", "Save less often or to a faster disk"),
}
"""Phase outside of steps -> what a rank does in it, and advice for the user."""
LEAST_SHARE = 0.05
"""Share of an epoch that a rank must cost the others to be suspected: less is noise."""
LEAST_SECONDS = 2.0
"""Seconds that a rank must have cost the others, in consecutive epochs, before the user is warned.

Less is not worth mending, and on a busy machine the same rank may be the slowest twice by chance.
"""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others waited for in one epoch.

    Attributes:
        rank: Number of the rank.
        phase: Phase of OUTSIDE in which it exceeded the typical time the most.
        seconds: Seconds that it spent in that phase.
        typical: Seconds that the median rank spent in that phase.
        epoch_seconds: Duration of the epoch in seconds.
        lost: Seconds that the others waited for it, over all phases.
    """

    rank: int
    phase: Phase
    seconds: float
    typical: float
    epoch_seconds: float
    lost: float


def find_straggler(outside: np.ndarray, epoch_seconds: float) -> Straggler | None:
    """Return the rank that the others waited for; None if none stands out.

    Args:
        outside: Seconds of each rank in each phase of OUTSIDE, of shape (ranks, phases).
        epoch_seconds: Duration of the epoch in seconds.
    """
    slowest = int(outside.sum(axis=1).argmax())
    # The lower median: of two ranks the faster one.
    lost = outside[slowest].sum() - median_low(outside.sum(axis=1))
    if lost <= LEAST_SHARE * epoch_seconds:
        return None
    typical = np.array([median_low(column) for column in outside.T])
    phase = int((outside[slowest] - typical).argmax())
    return Straggler(
        slowest,
        list(OUTSIDE)[phase],
        float(outside[slowest, phase]),
        float(typical[phase]),
        epoch_seconds,
        float(lost),
    )


class StragglerWatch:
    """Compares the ranks' times in one fit, and warns on rank 0 about a rank that slows the others down."""

    def __init__(self, ranks: Communicator = ALL_RANKS) -> None:
        self._ranks = ranks
        self._before = _times()
        self._suspect: tuple[int, Phase] | None = None
        self._lost = 0.0
        self._named: set[int] = set()

    def look(self, epoch: int) -> dict[str, list[float]]:
        """Compare the times of the epoch of index `epoch`, which has ended, and warn if a rank lags. A collective.

        Returns:
            Phase -> seconds of each rank in it; "seconds" is the duration of the epoch. Empty if there is only one
            rank.
        """
        if self._ranks.size() == 1:
            return {}
        now = _times()
        mine, self._before = now - self._before, now
        everyone = self._ranks.allgather(mine[None], "hvdtrain_rank_times").numpy()
        found = find_straggler(everyone[:, 1:-1], float(everyone[:, -1].max()))
        seen = None if found is None else (found.rank, found.phase)
        if seen != self._suspect:
            self._suspect, self._lost = seen, 0.0
        elif found and self._lost + found.lost >= LEAST_SECONDS and found.rank not in self._named:
            self._named.add(found.rank)
            self._warn(found, epoch)
        self._lost += found.lost if found else 0.0
        return dict(zip(("steps", *OUTSIDE, "seconds"), everyone.T.round(3).tolist(), strict=True))

    def _warn(self, slow: Straggler, epoch: int) -> None:
        what, advice = OUTSIDE[slow.phase]
        host = self._ranks.exchange(socket.gethostname(), "hosts")[slow.rank]
        if self._ranks.rank() == 0:
            warn_user(
                f"Rank {slow.rank} (host {host}) slows the others down: it spent {slow.seconds:.1f} of the "
                f"{slow.epoch_seconds:.1f} s of epoch {epoch + 1} {what}, the others {slow.typical:.1f} s. "
                f"{advice}"
            )


def _times() -> np.ndarray:
    """Return this rank's seconds so far in steps and in each phase of OUTSIDE, and the present time."""
    spent = own_seconds()
    return np.array([*(spent.get(p, 0.0) for p in ("training", *OUTSIDE)), time.monotonic()])
