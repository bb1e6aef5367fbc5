"""events.jsonl: what is written, how often, and what becomes of it when the disk is full or the run is killed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.report.run_record import read_run
from hvdtrain.trainer import event_log
from hvdtrain.trainer.event_log import EventLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(path: Path) -> list[str]:
    return [line["event"] for line in lines(path)]


def test_nothing_is_written_before_the_run_has_its_folder(tmp_path: Path) -> None:
    """Where a fit is refused since the folder is another run's, and on all ranks but the first."""
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(UsageError), log.watching():
        log.note("epoch", epoch=1)
        log.count(1, 1, {}, dict)
        raise UsageError("contains another run")
    assert list(tmp_path.iterdir()) == []


def test_steps_are_counted_and_written_about_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now)
    log = EventLog(tmp_path / "events.jsonl")
    log.begin(None, workers=2)
    log.begin_steps()
    asked = []
    for step in range(1, 11):
        now += 0.5 if step == 3 else 0.25
        log.count(1, 8, {"loss": step}, lambda step=step: asked.append(step) or {"step": step})  # type: ignore
    log.count(0, 0, {"loss": 10}, lambda: {"step": 10}, last=True)
    now += 5.0
    log.begin_steps()
    log.count(0, 0, {}, lambda: {"step": 10}, last=True)
    found = [line for line in lines(tmp_path / "events.jsonl") if line["event"] == "steps"]
    losses = [line["values"]["loss"] for line in found]
    assert losses == [2, 6, 10], "nothing waits for the step that has just begun, but for the last"
    assert asked == [3, 7], "what a step has to tell is asked only when it is written"
    assert [(one["step"], one["steps"], one["examples"]) for one in found] == [
        (3, 3, 24),
        (7, 4, 32),
        (10, 3, 24),
    ]
    assert [one["seconds"] for one in found] == [1.0, 1.0, 0.75]
    assert [one["slowest"] for one in found] == [0.5, 0.25, 0.25]


def test_a_long_run_writes_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now)
    log = EventLog(tmp_path / "events.jsonl")
    log.begin(None)
    log.begin_steps()
    while now < 864_000:  # Ten days, a minute a step.
        now += 60.0
        log.count(1, 1, {}, dict)
    assert 2_000 < len(lines(tmp_path / "events.jsonl")) < 6_000


def test_no_interval_of_a_live_run_counts_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten days with steps of a minute and an hour of validation a day, after five minutes of compilation."""
    now = 0.0
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now)
    monkeypatch.setattr(event_log.time, "time", lambda: now)
    log = EventLog(tmp_path / "events.jsonl")

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert read_run(tmp_path, now - 1e-3).state == "running", f"{now} s"

    log.begin(None, workers=2, epochs=10, epoch=1, step=1)
    passes(300.0)
    for epoch in range(1, 11):
        log.begin_steps()
        for step in range(1, 24 * 60, 60):
            for each in range(60):
                facts = {"epoch": epoch, "step": step + each, "learning_rate": None}
                now += 60.0
                log.count(1, 1, {}, facts.copy)
            passes(0.0)
        for step in range(1, 1800):
            now += 2.0
            log.validate(step)
            if step % 20 == 0:
                passes(0.0)
    assert read_run(tmp_path, now + 3600).state == "ended without notice (killed?)"
    validations = [one for one in lines(tmp_path / "events.jsonl") if one["event"] == "validation"]
    assert {one["step"] for one in validations} >= {1}
    assert len(validations) < 3000


def test_warnings_and_the_end_are_noted_and_warnings_shown(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with log.watching():
            log.begin(None)
            warnings.warn("rank 1 is slow", stacklevel=1)
        warnings.warn("later", stacklevel=1)
    assert [str(one.message) for one in shown] == ["rank 1 is slow", "later"]
    _, warning, end = lines(tmp_path / "events.jsonl")
    assert (warning["text"], end["how"]) == ("rank 1 is slow", "finished")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (UsageError("no data"), "UsageError: no data"),
        (RuntimeError("password=hunter2"), "RuntimeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_is_named_and_only_our_own_is_quoted(
    tmp_path: Path, error: BaseException, how: str
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(type(error)), log.watching():
        log.begin(None)
        raise error
    assert lines(tmp_path / "events.jsonl")[-1]["how"] == how


def test_numbers_of_every_kind_are_plain_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    values = {"loss": np.float32(1 / 3), "f1": np.array([0.25, 0.75]), "nan": np.nan, "inf": np.inf}
    log.begin(None, values=values, steps=np.int64(3), none=None, long=[np.float64(2)])
    (found,) = lines(tmp_path / "events.jsonl")
    assert found["values"] == {"loss": 0.333333, "f1": 0.5, "nan": None, "inf": None}
    assert (found["steps"], found["none"], found["long"]) == (3, None, [2])


def test_half_a_line_of_a_killed_run_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "beg')
    log = EventLog(path)
    log.begin(None, workers=1)
    log.note("end", how="finished")
    first, *rest = path.read_text().splitlines()
    assert first == '{"event": "beg'
    assert [json.loads(line)["event"] for line in rest] == ["begin", "end"]


def test_a_full_disk_is_warned_of_once_and_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    with (
        pytest.warns(UserWarning, match="cannot be written: .*No space left") as shown,
        log.watching(),
    ):
        log.begin(None)
        log.note("epoch")
    assert len(shown) == 1
    path.unlink()
    log.begin(None)
    assert names(path) == ["begin"]
