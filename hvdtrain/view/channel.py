"""How rank 0 tells `hvdtrain run`, which has the terminal, what to draw there: events in between its own output.

An event is an escape sequence (APC) around a line of JSON. Nothing in JSON ends such a sequence, a launcher passes it
on like any other output, and a terminal that gets one shows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "\x1b_hvdtrain ", "\x1b\\"
LONGEST = 1 << 20
"""Bytes of one event: what is longer is none."""
_BEGIN, _END = BEGIN.encode(), END.encode()


def encoded(event: Mapping[str, Any]) -> str:
    """The event as a rank writes it, in ASCII."""
    return f"{BEGIN}{json.dumps(event)}{END}"


@dataclass
class EventFilter:
    """Takes events out of what a rank writes. Feed it what arrives; `rest` gives what need not wait any longer."""

    _held: bytes = b""

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """The output in `data` without events, and the events."""
        if not self._held and b"\x1b" not in data:
            return data, []
        data, self._held = self._held + data, b""
        kept: list[bytes] = []
        events: list[dict[str, Any]] = []
        while (begin := data.find(_BEGIN)) >= 0:
            kept.append(data[:begin])
            end = data.find(_END, begin)
            if end < 0 and len(data) - begin <= LONGEST:
                self._held = data[begin:]
                return b"".join(kept), events
            event = _event(data[begin + len(_BEGIN) : end]) if end >= 0 else None
            if event is not None:
                events.append(event)
                data = data[end + len(_END) :]
            else:
                kept.append(_BEGIN)
                data = data[begin + len(_BEGIN) :]
        cut = _begun(data)
        self._held = data[cut:]
        return b"".join([*kept, data[:cut]]), events

    def rest(self) -> bytes:
        """What might have become the beginning of an event, if nothing more comes for a moment."""
        if self._held.startswith(_BEGIN):
            return b""
        held, self._held = self._held, b""
        return held


def _event(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("time"), int | float) else None


def _begun(data: bytes) -> int:
    """Where the beginning of an event begins at the end of `data`; its length if nowhere."""
    at = data.rfind(b"\x1b", -len(_BEGIN))
    return at if at >= 0 and _BEGIN.startswith(data[at:]) else len(data)
