"""Horovod's helper process for a rank over Gloo. Its shell waits for the rank, or for the ssh that runs it.

It is a new Python process that loads this module, which imports next to nothing, as the rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.context import SpawnContext, SpawnProcess

from hvdtrain.environment import EXIT_SIGNAL_BASE


class RankHelper(SpawnProcess):
    """Helper process that ends what it leaves: after a signal, its ssh would live on, and Horovod read it forever."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, then end what it has left behind."""
        super().join(timeout)
        if self.exitcode is not None and self.exitcode not in range(EXIT_SIGNAL_BASE + 1):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ident or 0, signal.SIGTERM)


class RankHelpers(SpawnContext):
    """Multiprocessing context with which Horovod creates its processes."""

    Process = RankHelper
