"""`hvdtrain bench slow-link`: how it starts its ranks, and the table, from figures made up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.bench import slow_link
from hvdtrain.cli.bench import bench


def test_each_way_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(
        launch: Any, ranks: int, script: Path, options: dict[str, Any], limit: float
    ) -> dict[str, Any]:
        started.append((ranks, options, launch(ranks, script, ())))
        fewer = 1 + len(started)
        return {"steps": 100, "seconds": 60 / fewer, "bytes": 6000 // fewer, "accuracy": 0.975}

    monkeypatch.setattr(slow_link, "run_measurement", run)
    ways = ["--way", "dense", "--way", "diloco"]
    done = CliRunner().invoke(bench, ["slow-link", "-H", "a:1,b:1", "--every", "5", *ways])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert rows[2] == ["dense", "0.975", "100", "30", "30.0", "1.0", "x", "1.0", "x"]
    assert rows[3] == ["diloco", "0.975", "100", "20", "20.0", "1.5", "x", "1.5", "x"]
    for (ranks, options, words), way in zip(started, ("dense", "diloco"), strict=True):
        assert ranks == 2
        assert options == {"task": "digits", "way": way, "every": 5, "goal": 0.97}
        assert "a:1,b:1" in words and "20.0" in words


def test_one_host_has_no_link() -> None:
    done = CliRunner().invoke(bench, ["slow-link", "-H", "a:2"])
    assert done.exit_code == 2 and "at least two hosts" in done.output
