"""Ranks as a watchdog sees them, for tests."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.launch.running.rank_monitor import RankStatus
from hvdtrain.launch.running.watchdog import Limits
from hvdtrain.worker.heartbeat import Heartbeat

LIMITS = Limits(still=20, waiting=300, busy=900, hang=1800)


def rank(number: int, phase: str = "training", **changes: object) -> RankStatus:
    """A rank that is well, in step 8 if it trains; `changes` are for the status or its heartbeat."""
    beat = Heartbeat(phase, 7 if phase == "training" else -1)  # type: ignore[arg-type]
    own = {
        name: changes.pop(name) for name in list(changes) if name in Heartbeat.__dataclass_fields__
    }
    status = RankStatus(number, 100 + number, "running", 60, 0, replace(beat, **own))  # type: ignore[arg-type]
    return replace(status, **changes)  # type: ignore[arg-type]
