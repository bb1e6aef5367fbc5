"""What a launch is given on its standard input goes to rank 0, as under mpirun.

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

_STDIN = 0
_TICK_SECONDS = 0.2
_BACKGROUND_SECONDS = 0.5


class InputRelay:
    """Use as a context manager; at its end nothing reads the input any more.

    Attributes:
        reading: the descriptor that the command reads.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def __enter__(self) -> InputRelay:
        return self

    def start(self) -> None:
        """Call this when the command has its descriptor."""
        os.close(self.reading)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread.ident is None:
            os.close(self.reading)
            os.close(self._writing)
        else:
            self._thread.join(2 * _TICK_SECONDS)

    def _relay(self) -> None:
        # The main thread takes all signals. With SIGTTIN blocked, a read from the background fails and stops nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while not self._ended.is_set() and sys.__stdin__ is not None:
                if not select.select([_STDIN], [], [], _TICK_SECONDS)[0]:
                    continue
                try:
                    data = os.read(_STDIN, 65536)
                except OSError:
                    self._ended.wait(_BACKGROUND_SECONDS)
                    continue
                if not data:
                    break
                _write_all(self._writing, data)
        except OSError:
            pass  # Nobody reads it.
        finally:
            with suppress(OSError):
                os.close(self._writing)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
