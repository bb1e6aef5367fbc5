"""Writes one checkpoint while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writing:
    """A checkpoint that is being written, in a thread which the interpreter waits for when it ends.

    Args:
        step: after which it was taken.
        write: writes it; raises OSError if it cannot.
    """

    def __init__(self, step: int, write: Callable[[], object]) -> None:
        self.step = step
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvdtrain-checkpoint")
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether `error` would not wait."""
        return not self._thread.is_alive()

    def error(self) -> OSError | None:
        """Wait for its end; return why it could not be written, None if it was. Raises any other error."""
        self._thread.join()
        if self._error is None or isinstance(self._error, OSError):
            return self._error
        raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
