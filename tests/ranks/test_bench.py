"""What `hvdtrain bench` starts on ranks trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import launch

from hvdtrain.bench import bandwidth, scaling


@pytest.mark.slow
@pytest.mark.parametrize(("way", "steps"), [("trainer", None), ("tcp", 20), ("mpi", 20)])
def test_scaling_by(way: str, steps: int | None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {"way": way, "name": "mnist", "batch_size": 4, "rounds": 1, "steps": steps}
    ran = launch([sys.executable, scaling.__file__, json.dumps(options), str(report)])
    assert ran.returncode == 0, ran.output
    found = json.loads(report.read_text())
    assert found["examples"] == 8
    assert found["loss"] < np.log(10), "ten classes, guessed"


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
