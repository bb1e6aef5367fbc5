"""The figures of `hvdtrain bench pipeline`, from turns made up by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.bench import pipeline_bubble
from hvdtrain.bench.pipeline_bubble import measure_bubble, theory
from hvdtrain.bench.turns import Turn


def test_the_schedule_alone() -> None:
    assert [theory(count, 2) for count in (1, 2, 4)] == [2, 1.5, 1.25]


def test_a_step_is_compared_with_one_stage_and_with_stages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seconds by ranks, layers and core.
    seconds = {(1, 8, 0): 8.0, (2, 8, 0): 6.0, (1, 4, 0): 4.5, (1, 4, 1): 5.0}
    running: list[Any] = []

    def start(launch: Any, np: int, script: Path, options: Mapping[str, Any]) -> Any:
        key = (np, options["layers"], options["core"])
        running.append(key)
        return SimpleNamespace(key=key, seconds=seconds[key])

    @contextlib.contextmanager
    def turns() -> Iterator[Callable[..., Any]]:
        yield start

    def take(*jobs: Any) -> list[Turn]:
        return [Turn((job.seconds,), 16) for job in jobs]

    def end(jobs: Any) -> None:
        for job in jobs:
            running.remove(job.key)

    monkeypatch.setattr(pipeline_bubble, "in_turns", turns)
    monkeypatch.setattr(pipeline_bubble, "take_turns", take)
    monkeypatch.setattr(pipeline_bubble, "end", end)
    launch: Any = None
    found = dict(measure_bubble([4, 8], 2, 512, 16, 3, launch))
    assert running == [], "the jobs of one number end before those of the next begin"
    assert [len(passes) for passes in found.values()] == [3, 3]
    bubble = found[4][0]
    assert (bubble.reference, bubble.measured, bubble.apart) == (4, 6, 5)
    assert (bubble.ratio, bubble.of_stages) == (1.5, 1.2)
