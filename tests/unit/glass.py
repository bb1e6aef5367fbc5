"""A terminal as a test sees it: rows of characters, and the codes with which the live view moves in them."""

import re


class Glass:
    """Takes what is written to a terminal.

    Attributes:
        rows: what it shows, from the first line on that was ever written.
    """

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.rows = [""]
        self._row = self._column = 0

    def write(self, text: str) -> "Glass":
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b.|[\n\r]|[^\x1b\n\r]", text):
            if part == "\n":
                self._row, self._column = self._row + 1, 0
                self.rows += [""] * (self._row + 1 - len(self.rows))
            elif part == "\r":
                self._column = 0
            elif part.endswith("A") and part.startswith("\x1b["):
                self._row = max(0, self._row - int(part[2:-1] or 1))
            elif part in ("\x1b[K", "\x1b[J"):
                self.rows[self._row] = self.rows[self._row][: self._column]
                del self.rows[self._row + 1 if part == "\x1b[J" else len(self.rows) :]
            elif not part.startswith("\x1b"):
                assert self._column < self.columns, "the row is full"
                row = self.rows[self._row].ljust(self._column)
                self.rows[self._row] = row[: self._column] + part + row[self._column + 1 :]
                self._column += 1
            else:
                assert re.fullmatch(r"\x1b\[\d+m", part), part
        return self
