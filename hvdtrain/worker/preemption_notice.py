"""The notice that this job will be ended soon: SIGUSR1, sent by Slurm or `hvdtrain run`."""

from __future__ import annotations

import os
import signal
from types import FrameType


class _Listener:
    """Handler of SIGUSR1 that remembers and reports its arrival."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        # Not print, which the signal may have interrupted.
        os.write(2, f"rank {self._rank}: received SIGUSR1: this job will end soon\n".encode())


def listen(rank: int) -> None:
    """Record SIGUSR1 and report it in one line; by default it would kill this process.

    A handler that the script sets later replaces this one.
    """
    signal.signal(signal.SIGUSR1, _Listener(rank))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def warned() -> bool:
    """Return whether this rank has received SIGUSR1, the notice that its job will be ended soon."""
    handler = signal.getsignal(signal.SIGUSR1)
    return isinstance(handler, _Listener) and handler.heard
