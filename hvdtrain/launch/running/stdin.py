"""Forwards the standard input of a launch to rank 0, as mpirun does.

The command reads a pipe, never the terminal itself: it runs in a session of its own, where nothing would stop it from
taking what is typed at the shell's prompt while the launch is in the background.
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
    """Use as a context manager; after it, nothing reads the input.

    Attributes:
        reading: the descriptor that the command reads.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def __enter__(self) -> InputRelay:
        return self

    def start(self) -> None:
        """Call this when the command has its descriptor."""
        os.close(self.reading)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is None:
            os.close(self.reading)
            os.close(self._writing)
        else:
            self._thread.join(_ENDING_SECONDS)

    def _relay(self) -> None:
        # The main thread takes all signals. With SIGTTIN blocked, a read from the background fails and stops nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # The end of a pipe that nobody reads reports an error, whatever it is asked for.
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
