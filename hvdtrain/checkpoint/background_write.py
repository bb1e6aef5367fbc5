"""Writes one checkpoint in a thread while the training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWrite:
    """A checkpoint being written in a thread, for which the interpreter waits before it exits.

    Args:
        step: Number of steps trained when the state was captured.
        write: Function that writes the checkpoint; raises OSError if it cannot.
    """

    def __init__(self, step: int, write: Callable[[], object]) -> None:
        self.step = step
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvdtrain-checkpoint")
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that `error` returns at once."""
        return not self._thread.is_alive()

    def error(self) -> OSError | None:
        """Wait for the thread; return the OSError that `write` raised, or None. Raise any other exception."""
        self._thread.join()
        if self._error is None or isinstance(self._error, OSError):
            return self._error
        raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
