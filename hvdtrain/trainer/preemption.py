"""A job that is told to end, or whose time to save has come: its ranks agree on the step at which all of them do so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max
from hvdtrain.trainer.elastic_job import HostChanges
from hvdtrain.worker.preemption_notice import warned

LOOK_SECONDS = 1.0
"""Between two looks, which cost a small allreduce each."""
MOST_STEPS = 1000
"""Between two looks, however fast the steps are."""


class Preemption:
    """Listens for SIGTERM, for the SIGUSR1 that Slurm or `hvdtrain run` sends before a job's end, and for hosts that
    come to an elastic job or leave it.

    Args:
        ranks: that train together.
    """

    def __init__(self, ranks: Communicator = ALL_RANKS) -> None:
        self._ranks = ranks
        self._terminated = False
        self._hosts = HostChanges()
        self._looked: tuple[int, float] | None = None
        self._next = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In this block SIGTERM is noted, unless the script has a handler of its own."""
        in_main = threading.current_thread() is threading.main_thread()
        ours = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if ours:
            signal.signal(signal.SIGTERM, self._note)
        try:
            with self._hosts.listening():
                yield
        finally:
            if ours:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def told(self) -> bool:
        """Whether this rank was told to end."""
        return self._terminated or warned()

    def agreed(self, steps: int, due: bool = False) -> tuple[bool, bool]:
        """Return whether any rank was told to end or of other hosts, and whether saving is `due` on any, as far as they
        have looked.

        A collective at some steps.

        Args:
            steps: trained so far, the same on all ranks.
            due: whether it is time to save by this rank's clock.
        """
        if steps < self._next:
            return False, False
        now = time.monotonic()
        pace = LOOK_SECONDS
        if self._looked is not None and steps > self._looked[0]:
            pace = (now - self._looked[1]) / (steps - self._looked[0])
        self._looked = steps, now
        # The slowest rank's pace, so that all look again at the same step.
        mine = np.array([self.told or self._hosts.heard, due, pace], np.float64)
        told, everyones, slowest = self._ranks.allreduce(mine, "hvdtrain_preempted", Max).numpy()
        self._next = steps + int(np.clip(LOOK_SECONDS / max(slowest, 1e-9), 1, MOST_STEPS))
        return bool(told), bool(everyones)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
