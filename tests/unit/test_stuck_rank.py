"""When a rank that nobody watches ends itself."""

from __future__ import annotations

import threading

import pytest

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.errors import UsageError
from hvdtrain.worker.heartbeat import Heartbeat
from hvdtrain.worker.stuck_rank import end_when_stuck, reason_to_end

TRAINS = Heartbeat("training", 7, since=100.0)
OF_TWO = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}


@pytest.mark.parametrize(
    ("beat", "now", "resumed", "says"),
    [
        (TRAINS, 129.0, 0.0, ""),
        (TRAINS, 130.0, 0.0, "has made no progress for 30 s, in training, step 8: "),
        (TRAINS, 5000.0, 4990.0, ""),  # It was halted.
        (Heartbeat("init", waiting=True, since=100.0), 131.0, 0.0, "for 30 s, in hvdtrain.init(): "),
        (Heartbeat("script", waiting=True, detail="sum", since=100.0), 131.0, 0.0, "collective sum"),
        # Of a loop of the script's own there may be no news; others may have more data.
        (Heartbeat("script", since=100.0), 5000.0, 0.0, ""),
        (Heartbeat("script", waiting=True, detail="join", since=100.0), 5000.0, 0.0, ""),
        (Heartbeat("ended", since=100.0), 5000.0, 0.0, ""),
        (Heartbeat("input", detail="download", since=100.0, allowed=60.0), 189.0, 0.0, ""),
        (Heartbeat("input", detail="download", since=100.0, allowed=60.0), 190.0, 0.0, "for 90 s"),
    ],
)  # fmt: skip
def test_a_rank_without_progress(beat: Heartbeat, now: float, resumed: float, says: str) -> None:
    reason = reason_to_end(beat, now, resumed, limit=30.0)
    assert says in reason
    assert bool(reason) == bool(says)


@pytest.mark.parametrize(
    ("changes", "watches"),
    [
        ({}, True),
        ({"HVDTRAIN_HANG_TIMEOUT": "60"}, True),
        ({"HVDTRAIN_HANG_TIMEOUT": "0"}, False),
        ({LAUNCH_ID: "1"}, False),
        ({"HOROVOD_SIZE": "1"}, False),
    ],
)
def test_who_watches(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], watches: bool
) -> None:
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self.name))
    end_when_stuck({**OF_TWO, **changes})
    assert started == ["hvdtrain-stuck-rank"] * watches


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="HVDTRAIN_HANG_TIMEOUT must be seconds, 0 or more"):
        end_when_stuck({**OF_TWO, "HVDTRAIN_HANG_TIMEOUT": text})
