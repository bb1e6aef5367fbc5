"""Forward the standard input of a launch to rank 0, as mpirun does.

The command reads a pipe, never the terminal itself: it runs in its own session, where nothing would keep it from
consuming what the user types at the shell's prompt while the launch is in the background.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress

from hvdtrain.standard_streams import write_all

_STDIN = 0
_BACKGROUND_SECONDS = 0.5
_ENDING_SECONDS = 0.5


class InputRelay:
    """Relay of standard input, used as a context manager; afterwards, nothing reads the input.

    Attributes:
        reading: Descriptor for the command to read.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def __enter__(self) -> InputRelay:
        return self

    def start(self) -> None:
        """Start relaying, after the command has inherited its descriptor."""
        os.close(self.reading)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is None:
            os.close(self.reading)
            os.close(self._writing)
        else:
            self._thread.join(_ENDING_SECONDS)

    def _relay(self) -> None:
        # The main thread handles all signals. With SIGTTIN blocked, a background read fails instead of stopping us.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # A pipe without a reader always reports an error, whichever events are requested.
        unread, either = select.poll(), select.poll()
        unread.register(self._writing, 0)
        either.register(self._writing, 0)
        either.register(_STDIN, select.POLLIN)
        with suppress(OSError):
            while sys.__stdin__ is not None and not unread.poll(0):
                if either.poll() and unread.poll(0):
                    break
                try:
                    data = os.read(_STDIN, 65536)
                except OSError:
                    unread.poll(1000 * _BACKGROUND_SECONDS)
                    continue
                if not data:
                    break
                write_all(self._writing, data)
        os.close(self._writing)
