"""The notice that this job will be ended soon: SIGUSR1, from Slurm or from `hvdtrain run`."""

from __future__ import annotations

import os
import signal
from types import FrameType


class _Listener:
    """The handler of SIGUSR1: remembers that it came, and reports it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        # No print: the signal may have come in the middle of one.
        os.write(2, f"rank {self._rank}: received SIGUSR1: this job will end soon\n".encode())


def listen(rank: int) -> None:
    """Record SIGUSR1 and report it in one line, instead of being killed by it.

    A handler that the script sets later replaces this one.
    """
    signal.signal(signal.SIGUSR1, _Listener(rank))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def warned() -> bool:
    """Whether this rank has been warned, by SIGUSR1, that its job will be ended soon."""
    handler = signal.getsignal(signal.SIGUSR1)
    return isinstance(handler, _Listener) and handler.heard
