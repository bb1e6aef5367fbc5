"""`hvdtrain bench peers`: who is started how, and the table, from rates made up by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.bench import peers
from hvdtrain.bench.measurement import Comparison
from hvdtrain.cli.bench import bench
from hvdtrain.errors import EngineError


def stand_in(monkeypatch: pytest.MonkeyPatch, rates: Mapping[str, float]) -> dict[str, Any]:
    """Let each way have its rate; returns what each was started with."""
    started: dict[str, Any] = {}

    def start(
        launch: Any, np: int, script: Path, options: dict[str, Any], environ: dict[str, str]
    ) -> Any:
        way = options["way"]
        started[way] = [launch(2, script, ())[0], np, script.name, options, environ]
        return SimpleNamespace(rate=rates[way])

    @contextlib.contextmanager
    def turns() -> Iterator[Any]:
        yield start

    monkeypatch.setattr(peers, "in_turns", turns)
    monkeypatch.setattr(peers, "take_turns", lambda *jobs: list(jobs))
    monkeypatch.setattr(peers, "end", lambda jobs: None)
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
    found = dict(peers.measure_peers("mnist", 64, 2, 4, ours, bare))
    assert found == {
        way: 2 * [Comparison(100, rate)] for way, rate in RATES.items() if way != "threads"
    }
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
    found = dict(peers.measure_peers("mnist", 64, 1, 2, launch, launch))
    assert found.keys() == RATES.keys() - {"threads", "horovod", "torch"}


def test_a_framework_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, RATES)
    find, own = importlib.util.find_spec, peers.take_turns
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: name in ("tf_keras", "torch") or find(name)
    )

    def take(*jobs: Any) -> list[Any]:
        if jobs[0].rate == failing:
            raise EngineError("No module named sympy")
        return own(*jobs)

    monkeypatch.setattr(peers, "take_turns", take)
    failing = RATES["torch"]
    done = CliRunner().invoke(bench, ["peers", "--passes", "1"], catch_exceptions=False)
    assert "left out: PyTorch, DistributedDataParallel. No module named sympy" in done.output
    assert f"{peers.WAYS['keras'].title:45} 1.200" in done.output
    failing = RATES["keras"]
    with pytest.raises(EngineError, match="sympy"):
        CliRunner().invoke(bench, ["peers", "--passes", "1"], catch_exceptions=False)


@pytest.mark.parametrize("ours", [120, 99])
def test_the_table_says_when_another_way_is_faster(
    ours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {**RATES, "keras": ours, "trainer": 90})
    done = CliRunner().invoke(bench, ["peers", "--passes", "1"], catch_exceptions=False)
    lines = done.output.splitlines()
    first = next(line for line in lines if line.startswith("medians"))
    best = lines[lines.index(first) + 1]
    assert best.split()[-1] == ("1.200" if ours == 120 else "1.000")
    told = "fastest here: Keras, one process on all cores" in done.output
    assert told == (ours == 99)
    assert "to repeat: bench peers --num-proc 2" in done.output
