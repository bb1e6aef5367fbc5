"""What `hvdtrain bench` starts on ranks trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ENVIRONMENT, launch, own_launcher

from hvdtrain.bench import bandwidth, pipeline_bubble, scaling, turns


def two_turns(
    module: Any, options: dict[str, Any], over: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[turns.Turn, turns.Turn]:
    """Return two turns of two ranks; Horovod is shut down between them."""
    monkeypatch.setattr(turns, "SECONDS", 0.2)

    def ranks(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        return [*own_launcher(np, over), sys.executable, str(script), *arguments]

    with turns.in_turns() as start:
        job = start(ranks, 2, Path(module.__file__), options, ENVIRONMENT)
        job.steps = 30
        first, second = [turns.take_turns(job)[0] for _ in range(2)]
    assert len(first.seconds) == len(second.seconds) == 30
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "over"), [("trainer", "gloo"), ("keras", "mpi"), ("tcp", "gloo"), ("mpi", "mpi")]
)
def test_scaling_by(way: str, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"way": way, "name": "mnist", "batch_size": 4}
    first, second = two_turns(scaling, options, over, monkeypatch)
    assert first.examples == second.examples == 8
    assert second.loss < first.loss < np.log(10), "ten classes, guessed"


@pytest.mark.slow
def test_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"count": 2, "layers": 4, "width": 8, "batch_size": 16, "core": 0}
    for turn in two_turns(pipeline_bubble, options, "mpi", monkeypatch):
        assert turn.examples == 16
        assert 0 < turn.step_seconds < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "raw"), [("allreduce", "mpi"), ("allgather", "mpi"), ("broadcast", "tcp")]
)
def test_collectives_beside_what_they_run_on(tmp_path: Path, name: str, raw: str) -> None:
    report = tmp_path / "report.json"
    options = {"name": name, "sizes": [5, 4096], "rounds": 2, "raw": raw}
    ran = launch([sys.executable, bandwidth.__file__, json.dumps(options), str(report)])
    assert ran.returncode == 0, ran.output
    found = json.loads(report.read_text())
    assert found["bytes"] == [8, 4096], "as many float32 for each rank"
    for seconds in (*found["horovod"], *found["raw"]):
        assert len(seconds) == 2
        assert 0 < min(seconds) <= max(seconds) < 10
