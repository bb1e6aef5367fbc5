"""A pipe for news of the ranks whose reader may be behind: a paused output must not stop those who report."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any


class NewsPipe:
    """The writing end of a pipe that takes lines of JSON without waiting for its reader.

    Args:
        descriptor: Descriptor of the pipe, non-blocking; None: nobody reads the news.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()

    def send(self, news: Any, once: bool = False) -> None:
        """Write one line, or what fits of it, and the rest with a later call.

        Args:
            news: What JSON can hold.
            once: Whether the line is kept until the reader takes it. Otherwise it is dropped while older ones wait: the
                next look at the ranks reports the same again.
        """
        self._write()
        if self._descriptor is not None and (once or not self._waiting):
            self._waiting += json.dumps(news).encode() + b"\n"
            self._write()

    def _write(self) -> None:
        try:
            with suppress(BlockingIOError):
                while self._waiting and self._descriptor is not None:
                    del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError:
            self._descriptor = None  # It has no reader any more.
            self._waiting.clear()
