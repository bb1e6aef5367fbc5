"""Encodes events for the live view into rank 0's output, for `hvdtrain run`, which draws it.

An event is an APC escape sequence around a line of JSON. No JSON text ends such a sequence, launchers pass it on like
any other output, and a terminal that receives one shows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "\x1b_hvdtrain ", "\x1b\\"
LONGEST = 1 << 20
"""Maximum size of an event in bytes; longer ones are treated as output."""
_BEGIN, _END = BEGIN.encode(), END.encode()


def encoded(event: Mapping[str, Any]) -> str:
    """Return the escape sequence that holds `event`, in ASCII."""
    return f"{BEGIN}{json.dumps(event)}{END}"


@dataclass
class EventFilter:
    """Separates events from a rank's output, which may arrive in pieces; an incomplete event is held back."""

    _held: bytes = b""

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the output in `data` (and in held back bytes) without events, and the events."""
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
        """Return the bytes held back, unless an event has begun; call it when no output has arrived for a moment."""
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
    """Return the index in `data` of an incomplete event marker at its end; the length of `data` if there is none."""
    at = data.rfind(b"\x1b", -len(_BEGIN))
    return at if at >= 0 and _BEGIN.startswith(data[at:]) else len(data)
