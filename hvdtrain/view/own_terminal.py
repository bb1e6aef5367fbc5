"""The live view of a process that was started alone on a terminal, drawn below what the process prints."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO, cast

from hvdtrain.report.run_record import RunReader
from hvdtrain.view.live_view import render
from hvdtrain.view.region import Region, screen_of

REDRAW_SECONDS = 0.01
"""Minimum time between two redraws caused by printed lines; a skipped redraw waits for the next event or line."""


class TerminalView:
    """Context manager that draws the view from events (see `hvdtrain.trainer.event_log`).

    What Python code prints in the block appears above the view, which is hidden while a printed line is incomplete.
    """

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr
        self._reader = RunReader()
        self._region = Region()
        self._lock = threading.RLock()
        self._begun = False
        self._drawn_at = 0.0

    def __enter__(self) -> TerminalView:
        self._out, self._err = sys.stdout, sys.stderr
        sys.stdout = cast(TextIO, _Above(self, self._out))
        if self._err.isatty():
            sys.stderr = cast(TextIO, _Above(self, self._err))
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._erase()
            # Leave streams alone that were redirected in the block.
            if isinstance(sys.stdout, _Above):
                sys.stdout = self._out
            if isinstance(sys.stderr, _Above):
                sys.stderr = self._err

    def show(self, event: Mapping[str, Any]) -> None:
        """Update the view with an event."""
        with self._lock:
            self._reader.take(event)
            self._draw()

    def write(self, stream: TextIO, text: str) -> int:
        """Write `text` to `stream`, above the view."""
        with self._lock:
            if text:
                self._erase()
            count = stream.write(text)
            if text:
                stream.flush()
                self._begun = not text.endswith(("\n", "\r"))
                if time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
                    self._draw()
            return count

    def _draw(self) -> None:
        if self._begun:
            return
        screen = screen_of(self._out)
        lines = render(self._reader.record(), screen)
        if not lines:
            self._erase()
            return
        self._drawn_at = time.monotonic()
        self._out.write(self._region.draw(lines, screen.columns))
        self._out.flush()

    def _erase(self) -> None:
        screen = screen_of(self._out)
        self._out.write(self._region.erase(screen.columns))
        self._out.flush()


class _Above:
    """Wrapper of a standard stream that writes above the view."""

    def __init__(self, view: TerminalView, stream: TextIO) -> None:
        self.view = view
        self._stream = stream

    def write(self, text: str) -> int:
        return self.view.write(self._stream, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def view_around() -> TerminalView | None:
    """Return the view of an enclosing TerminalView block; None if there is none."""
    return sys.stdout.view if isinstance(sys.stdout, _Above) else None
