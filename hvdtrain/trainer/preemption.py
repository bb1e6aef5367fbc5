"""Preemption notices and time-based checkpoints: ranks agree on the step at which all of them save or stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.trainer.elastic_job import HostChanges
from hvdtrain.trainer.periodic_check import PeriodicCheck
from hvdtrain.worker.preemption_notice import warned


class Preemption:
    """Collects the reasons to stop: SIGTERM, the SIGUSR1 sent before a job's end, a file, or a change of hosts.

    Slurm or `hvdtrain run` sends the SIGUSR1. Hosts join or leave only in an elastic job.

    Args:
        ranks: Ranks that train together.
        file: Path of a file whose existence on this host asks the job to stop; None: no file does.
    """

    def __init__(self, ranks: Communicator = ALL_RANKS, file: str | Path | None = None) -> None:
        self._ranks = ranks
        self._check = PeriodicCheck("preempted", ranks)
        self._file = None if file is None else Path(file)
        self._terminated = False
        self._hosts = HostChanges()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for SIGTERM and for changes of hosts in this block; a SIGTERM handler of the script's own stays."""
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
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._terminated or warned() or self.by_file

    @property
    def by_file(self) -> bool:
        """Whether the file exists on this host; False if its folder cannot be reached."""
        # Path.exists raises the errors of a file system that has gone.
        return self._file is not None and os.path.exists(self._file)  # noqa: PTH110

    def agreed(self, steps: int, due: bool = False, now: bool = False) -> tuple[bool, bool]:
        """Return whether all ranks should stop, and whether they should save. A collective at steps on which all agree.

        Args:
            steps: Number of steps trained so far, the same on all ranks.
            due: Whether a checkpoint is due by this rank's clock.
            now: Whether to look even if no look is due; the same on all ranks.

        Returns:
            Whether any rank was asked to stop or was notified of other hosts, and whether a checkpoint is due on any
            rank. Both are False where the ranks do not look.
        """
        if not (now or self._check.due(steps)):
            return False, False
        told, everyones = self._check.reduce_max(steps, [self._interrupted, due])
        return bool(told), bool(everyones)

    def in_validation(self) -> Callable[[int], bool]:
        """Return a function that tells, for the number of batches evaluated so far, whether any rank was told to end.

        It is the same on all ranks, and a collective at some of these numbers. It has a pace of its own, because a
        batch takes another time in an evaluation than in training.
        """
        check = PeriodicCheck("preempted_in_validation", self._ranks)

        def agreed(batches: int) -> bool:
            if not check.due(batches):
                return False
            return bool(check.reduce_max(batches, [self._interrupted])[0])

        return agreed

    @property
    def _interrupted(self) -> bool:
        """Whether this rank was asked to stop or was notified of other hosts."""
        return self.stop_requested or self._hosts.heard

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
