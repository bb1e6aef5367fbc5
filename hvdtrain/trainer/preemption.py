"""A job that is told to end, or whose time to save has come: its ranks agree on the step at which all of them do so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.trainer.elastic_job import HostChanges
from hvdtrain.trainer.looks import Looks
from hvdtrain.worker.preemption_notice import warned


class Preemption:
    """Listens for SIGTERM, for the SIGUSR1 that Slurm or `hvdtrain run` sends before a job's end, for a file, and for
    hosts that come to an elastic job or leave it.

    Args:
        ranks: that train together.
        file: tells this job to end as soon as it exists on this host; None: none does.
    """

    def __init__(self, ranks: Communicator = ALL_RANKS, file: str | Path | None = None) -> None:
        self._ranks = ranks
        self._looks = Looks("preempted", ranks)
        self._file = None if file is None else Path(file)
        self._terminated = False
        self._hosts = HostChanges()

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
        return self._terminated or warned() or self.by_file

    @property
    def by_file(self) -> bool:
        """Whether the file is here."""
        return self._file is not None and self._file.exists()

    def agreed(self, steps: int, due: bool = False, now: bool = False) -> tuple[bool, bool]:
        """Return whether any rank was told to end or of other hosts, and whether saving is `due` on any, as far as they
        have looked.

        A collective at some steps.

        Args:
            steps: trained so far, the same on all ranks.
            due: whether it is time to save by this rank's clock.
            now: look whether or not it is time, the same on all ranks.
        """
        if not (now or self._looks.due(steps)):
            return False, False
        told, everyones = self._looks.together(steps, [self.told or self._hosts.heard, due])
        return bool(told), bool(everyones)

    def in_validation(self) -> Callable[[int], bool]:
        """Return a function that tells, for the number of batches evaluated so far, whether any rank was told to end.

        It is the same on all ranks, and a collective at some of these numbers. It has a pace of its own, because a
        batch takes another time in an evaluation than in training.
        """
        looks = Looks("preempted_in_validation", self._ranks)

        def agreed(batches: int) -> bool:
            if not looks.due(batches):
                return False
            return bool(looks.together(batches, [self.told or self._hosts.heard])[0])

        return agreed

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
