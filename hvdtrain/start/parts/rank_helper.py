"""Horovod's process for a rank over Gloo, whose shell waits for the rank, or for the ssh that runs it.

A new Python that loads this module: it imports next to nothing, since the rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.context import SpawnContext, SpawnProcess

from hvdtrain.environment import EXIT_SIGNAL_BASE


class RankHelper(SpawnProcess):
    """If a signal has ended it or its shell, that ssh would live on, and Horovod would read its output forever."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; end what it has left."""
        super().join(timeout)
        if self.exitcode is not None and self.exitcode not in range(EXIT_SIGNAL_BASE + 1):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ident or 0, signal.SIGTERM)


class RankHelpers(SpawnContext):
    """What Horovod uses to create its processes."""

    Process = RankHelper
