"""`hvdtrain bench peers`: who is started how, and the table, from rates made up by hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.bench import peers
from hvdtrain.cli.bench import bench


def stand_in(monkeypatch: pytest.MonkeyPatch, rates: Mapping[str, float]) -> dict[str, Any]:
    """Let each way have its rate; returns what each was started with."""
    started: dict[str, Any] = {}

    def run(
        launch: Any, np: int, script: Path, options: dict[str, Any], environ: dict[str, str]
    ) -> Any:
        way = options["way"]
        started[way] = [launch(2, script, ())[0], np, script.name, options, environ]
        return {"step_seconds": [[1.0]], "examples": rates[way]}

    monkeypatch.setattr(peers, "run_measurement", run)
    return started


RATES = {
    "plain": 60, "threads": 100, "mirrored": 90, "horovod": 95, "torch": 70, "bare": 80, "keras": 120, "trainer": 110,
}  # fmt: skip


def test_all_train_the_same_batch_on_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started = stand_in(monkeypatch, RATES)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    ours, bare = (
        lambda np, script, words, name=name: [name] for name in ("hvdtrain", "horovodrun")
    )
    (found,) = peers.measure_peers("mnist", 64, 1, 4, ours, bare)
    assert found == RATES
    for way, (launcher, ranks, script, options, environ) in started.items():
        whole = way in ("threads", "mirrored")
        assert options["batch_size"] * ranks == (64 if way == "plain" else 256), way
        assert ranks == (1 if whole or way == "plain" else 4)
        assert launcher == {"horovod": "horovodrun", "torch": sys.executable}.get(way, "hvdtrain")
        ours = "torch_peer.py" if way == "torch" else "scaling.py"
        assert script == ("peers.py" if whole or way == "horovod" else ours)
        assert environ.get("TF_NUM_INTRAOP_THREADS") == ("4" if whole else None)
        assert ("TF_USE_LEGACY_KERAS" in environ) == (way == "horovod")


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, RATES)
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: name not in ("tf_keras", "torch")
    )
    launch = lambda np, script, words: ["x"]  # noqa: E731
    (found,) = peers.measure_peers("mnist", 64, 1, 2, launch, launch)
    assert found.keys() == RATES.keys() - {"horovod", "torch"}


@pytest.mark.parametrize(("ours", "told"), [(120, False), (99, True)])
def test_the_table_says_when_one_process_is_as_fast(
    ours: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {**RATES, "keras": ours, "trainer": 90})
    done = CliRunner().invoke(bench, ["peers", "--passes", "1"], catch_exceptions=False)
    lines = done.output.splitlines()
    first = next(line for line in lines if line.startswith("medians"))
    best = lines[lines.index(first) + 1]
    assert best.split()[-1] == ("1.00" if told else "1.20")
    assert ("one process on all cores is at least as fast" in done.output) == told
    assert "to repeat: bench peers --num-proc 2" in done.output
