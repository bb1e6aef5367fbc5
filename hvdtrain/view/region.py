"""Redraws the last rows of a terminal, below all other output."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from hvdtrain.view.live_view import Line, Screen


def screen_of(terminal: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
    """Return the current size and capabilities of a terminal, which may be resized at any time.

    Args:
        terminal: Stream to the terminal; any other stream counts as 80 columns and 24 rows.
        environ: Environment variables; NO_COLOR (no-color.org) turns colours off.
    """
    try:
        size = os.get_terminal_size(terminal.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return Screen(
        size.columns or 80,
        size.lines or 24,
        colour=not environ.get("NO_COLOR"),
        blocks=(terminal.encoding or "").lower().replace("-", "").startswith("utf"),
    )


@dataclass
class Region:
    """Returns the text that draws or erases the rows; the cursor stays at the end of the last row.

    Attributes:
        drawn: Rows that are on the terminal now.
    """

    drawn: Sequence[Line] = field(default_factory=list)

    def draw(self, lines: Sequence[Line], columns: int) -> str:
        """Return the text that replaces the drawn rows by `lines`.

        The cursor must be at the end of the drawn rows; if there are none, at the beginning of a line.
        """
        back, self.drawn = self._back(columns), lines
        return back + "\n".join(f"{line.text}\x1b[K" for line in lines) + "\x1b[J"

    def erase(self, columns: int) -> str:
        """Return the text that clears the drawn rows and moves the cursor to the first of them."""
        if not self.drawn:
            return ""
        back, self.drawn = self._back(columns), []
        return f"{back}\x1b[J"

    def _back(self, columns: int) -> str:
        """Move the cursor to the beginning of the first row; a narrowed terminal wraps one row to several."""
        rows = sum(max(1, -(-line.cells // max(1, columns))) for line in self.drawn)
        return f"\r\x1b[{rows - 1}A" if rows > 1 else "\r"
