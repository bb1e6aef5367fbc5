"""The last rows of a terminal, which are drawn again and again below everything else that is written there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from hvdtrain.view.live_view import Line, Look


def look_of(terminal: TextIO, environ: Mapping[str, str] = os.environ) -> Look:
    """What a terminal can show, now: it may be resized at any time.

    Args:
        terminal: a stream to it; what is none has 80 columns.
        environ: may have NO_COLOR (no-color.org).
    """
    try:
        size = os.get_terminal_size(terminal.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return Look(
        size.columns or 80,
        size.lines or 24,
        colour=not environ.get("NO_COLOR"),
        blocks=(terminal.encoding or "").lower().replace("-", "").startswith("utf"),
    )


@dataclass
class Region:
    """Gives what to write to the terminal. The cursor stays behind the last row.

    Attributes:
        drawn: its rows, as they are on the terminal now.
    """

    drawn: Sequence[Line] = field(default_factory=list)

    def draw(self, lines: Sequence[Line], columns: int) -> str:
        """Draw these in place of those that are there. The cursor must be there, or at the beginning of a line."""
        back, self.drawn = self._back(columns), lines
        return back + "\n".join(f"{line.text}\x1b[K" for line in lines) + "\x1b[J"

    def erase(self, columns: int) -> str:
        """Leave the rows empty, and the cursor at the first one: something else is written there."""
        if not self.drawn:
            return ""
        back, self.drawn = self._back(columns), []
        return f"{back}\x1b[J"

    def _back(self, columns: int) -> str:
        """To the beginning of the first row. A terminal that has become narrower shows one row as several."""
        rows = sum(max(1, -(-line.cells // max(1, columns))) for line in self.drawn)
        return f"\r\x1b[{rows - 1}A" if rows > 1 else "\r"
