"""How often a training run writes to its event log, and how long a log may be silent until its run counts as killed.

The writer (`hvdtrain.trainer.event_log`) and the reader (`hvdtrain.report.run_record`) share this rule, so that no
interval of the one is longer than the patience of the other.
"""

from __future__ import annotations

INTERVAL_SECONDS = 1.0
"""Minimum time between two events of one kind that come with steps."""
INTERVAL_SHARE = 1e-3
"""The same, as a share of the time since `begin`: 100 days give 13,000 lines."""
SILENT_SECONDS = 60.0
"""How long a log may be silent at least, between two steps."""
FIRST_SECONDS = 600.0
"""How long it may be silent before the first step, which compiles, and may follow much data that is read again."""


def interval(age: float) -> float:
    """Return the minimum time between two events with steps, for a process that has trained for `age` seconds."""
    return max(INTERVAL_SECONDS, INTERVAL_SHARE * age)


def longest_silence(age: float, slowest: float | None) -> float:
    """Return the time after which a process that has written nothing counts as killed.

    Args:
        age: Seconds from its beginning to its last event.
        slowest: Seconds of the slowest step in the last "steps" event; None before the first one.
    """
    if slowest is None:
        return FIRST_SECONDS
    return max(SILENT_SECONDS, 3 * (interval(age) + slowest))
