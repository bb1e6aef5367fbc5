"""The live view of `hvdtrain run`, drawn from the events in rank 0's output, below the output of all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from hvdtrain.report.run_record import RunReader
from hvdtrain.view.channel import EventFilter
from hvdtrain.view.live_view import Screen, render
from hvdtrain.view.region import Region, screen_of

REDRAW_SECONDS = 0.05
"""Minimum time between two redraws."""


@dataclass
class LiveRows:
    """Returns the bytes that draw or erase the view, in the terminal's encoding."""

    terminal: TextIO
    _reader: RunReader = field(default_factory=RunReader)
    _region: Region = field(default_factory=Region)
    _events: EventFilter = field(default_factory=EventFilter)
    _is_new: bool = False
    _screen: Screen | None = None
    _drawn_at: float = float("-inf")

    def take(self, data: bytes) -> bytes:
        """Process the events in rank 0's standard output; return the output without them."""
        kept, events = self._events.feed(data)
        for event in events:
            self._reader.take(event)
            self._is_new = True
        return kept

    def rest(self) -> bytes:
        """Return held back output in which no event has begun; see `EventFilter.rest`."""
        return self._events.rest()

    def draw(self) -> bytes:
        """Return the bytes that draw the view; empty if it is up to date or was drawn less than REDRAW_SECONDS ago.

        The cursor must be at the end of the view; if it is not drawn, at the beginning of a line.
        """
        screen = screen_of(self.terminal)
        as_it_should = self._region.drawn and screen == self._screen and not self._is_new
        if as_it_should or time.monotonic() - self._drawn_at < REDRAW_SECONDS:
            return b""
        lines = [] if self._reader.end else render(self._reader.record(), screen)
        self._is_new, self._screen = False, screen
        if not lines:
            return self.erase()
        self._drawn_at = time.monotonic()
        return self._region.draw(lines, screen.columns).encode(self.terminal.encoding, "replace")

    def erase(self) -> bytes:
        """Return the bytes that clear the view, before other output."""
        columns = screen_of(self.terminal).columns
        return self._region.erase(columns).encode()
