"""Reads the events of a Horovod timeline of any size, also if it is truncated.

Horovod writes one JSON array, most of it in one line, and may be killed in the middle of an event. So the file is read
in pieces, and each event is decoded by itself. Anything else is counted and skipped.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

PIECE = 2**20
"""Number of characters to read at a time."""
LONGEST = 2**16
"""Maximum length of an event in characters. Horovod's have a few hundred, mostly for the tensor's name."""
MOST_DAMAGED = 1000
"""Maximum number of damaged places in a row; with more, the file is not a timeline."""


class Events:
    """Iterable of the events in a file, as the JSON objects that Horovod wrote.

    Args:
        path: Path of the file.

    Attributes:
        damaged: Number of places so far that hold no event, such as half of one.

    Raises:
        UsageError: During iteration, if the file cannot be read, or is not a timeline.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0
        self._in_a_row = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(PIECE)
                if not text.lstrip().startswith("["):
                    raise self.refused(
                        "empty: Horovod writes with the first operation"
                        if not text.strip()
                        else "not a Horovod timeline, which is a JSON array of events"
                    )
                while text:
                    more = file.read(PIECE)
                    text = (yield from self._complete(text, not more)) + more
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror or error}") from error

    def refused(self, why: str) -> UsageError:
        """Return the error for a file that is not a timeline; `why` completes "<path> is ..."."""
        return UsageError(f"{self._path} is {why}")

    def _complete(self, text: str, ends: bool) -> Generator[dict[str, Any], None, str]:
        """Yield the complete events in `text`; return the rest, which may continue in the next piece."""
        decode = json.JSONDecoder().raw_decode
        place = text.find("{")
        while place >= 0:
            try:
                found, after = decode(text, place)
            except (ValueError, RecursionError):
                if not ends and len(text) - place < LONGEST:
                    return text[place:]
                self._note_damaged()
                place = text.find("{", place + 1)
                continue
            if "ph" in found:
                self._in_a_row = 0
                yield found
            else:
                self._note_damaged()
            place = text.find("{", after)
        return ""

    def _note_damaged(self) -> None:
        self.damaged += 1
        self._in_a_row += 1
        if self._in_a_row > MOST_DAMAGED:
            raise self.refused(
                f"not a Horovod timeline: {MOST_DAMAGED:,} objects in a row are not events"
            )
