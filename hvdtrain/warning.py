"""The warning that this job will be ended soon: SIGUSR1, from Slurm or from `hvdtrain run`."""

from __future__ import annotations

import os
import signal
from types import FrameType

_received = False


def warned() -> bool:
    """Whether this rank has been warned that its job will be ended soon."""
    return _received


def listen(rank: int) -> None:
    """Note SIGUSR1 and say so in one line, instead of being ended by it.

    A script that sets a handler of its own later takes the place of this one.
    """

    def note(number: int, frame: FrameType | None) -> None:
        global _received
        _received = True
        # No print: the signal may have come in the middle of one.
        os.write(2, f"rank {rank}: warned by SIGUSR1: this job will be ended soon\n".encode())

    signal.signal(signal.SIGUSR1, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
