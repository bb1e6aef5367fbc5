"""Callbacks, files and learning rates of the Trainer on two ranks."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Results, on_ranks

from hvdtrain.report.charts import seconds_of_ranks
from hvdtrain.report.run_record import read_run

EXACT = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return on_ranks("trainer_callbacks", np=2, env={"FOLDER": str(folder)})


def test_gradients_that_wait_in_an_optimizer_with_its_own_apply(results: Results) -> None:
    for found in results.of("case_saved_while_own_gradients_wait"):
        assert max(found.values()) <= EXACT


@pytest.mark.slow
def test_early_stopping(results: Results) -> None:
    for found in results.of("case_early_stopping"):
        assert found["epochs apart"] == 0
        assert found["epochs"] < 8
        assert found["weights"] <= EXACT


def test_reduce_on_plateau(results: Results) -> None:
    for found in results.of("case_reduce_on_plateau"):
        assert found["rates apart"] <= 1e-6
        assert found["rates"][-1] < found["rates"][0]
        assert found["weights"] <= EXACT


def test_files_are_written_once(results: Results) -> None:
    first, second = results.of("case_writers")
    assert first["files"] == ["best.keras", "log.csv", "step.weights.h5"]
    assert first["boards"] > 3
    assert second["boards"] == 0
    assert first["history"] == second["history"]


PLAIN = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "hvdtrain"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import keras, numpy as np
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    model.fit(np.zeros((4, 3)), np.zeros((4, 1)), verbose=0)
    assert int(model.optimizer.iterations) in (7, 19), model.optimizer.iterations
"""


@pytest.mark.slow
def test_models_load_in_plain_keras(results: Results, folder: Path) -> None:
    results.of("case_writers"), results.of("case_run_dir")
    paths = [str(folder / "rank0" / "best.keras"), str(folder / "runs" / "one" / "model.keras")]
    command = [sys.executable, "-c", PLAIN, *paths]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert loaded.returncode == 0, loaded.stderr


def test_stop_on_one_rank(results: Results) -> None:
    # 6 steps an epoch: after the fourth, after the second epoch, in the third.
    assert results.of("case_stop_on_one_rank") == [{"batch": 4, "epoch": 12, "begin": 3}] * 2


def test_terminate_on_nan(results: Results) -> None:
    assert results.of("case_terminate_on_nan") == [3, 3]


def test_batch_logs(results: Results) -> None:
    first, second = results.of("case_batch_logs")
    assert first["losses"] == second["losses"]
    assert first["apart"] <= EXACT
    assert first["states apart"] <= EXACT


@pytest.mark.slow
def test_evaluate_in_a_step(results: Results) -> None:
    for found in results.of("case_evaluate_in_a_step"):
        assert max(found.values()) <= EXACT


@pytest.mark.slow
def test_backup_and_restore(results: Results) -> None:
    for found in results.of("case_backup_and_restore"):
        assert found["epochs"] == 3
        assert found["epochs of the next fit"] == 2
        assert found["weights"] == 0


@pytest.mark.slow
def test_backup_while_gradients_wait(results: Results) -> None:
    for found in results.of("case_backup_while_gradients_wait"):
        assert found["epochs"] == 3
        # The ranks' gradients are added up once more, in another order: Adam's steps of 0.01 hide nothing larger.
        assert found["weights"] <= 1e-6


@pytest.mark.slow
def test_a_rank_that_the_others_wait_for_is_named(results: Results, folder: Path) -> None:
    first, second = results.of("case_straggler")
    assert [len(one) for one in (first["slow"], second["slow"])] == [1, 0], "once, on rank 0"
    assert "Rank 1 (host " in first["slow"][0]
    assert " in callbacks, the others " in first["slow"][0]
    run = read_run(folder / "runs" / "slow")
    assert [epoch.number for epoch in run.epochs] == [1, 2, 3, 4, 5]
    # The last sleep comes after the last event.
    spent = [one["callbacks"] for one in seconds_of_ranks(run)]
    assert spent[1] - spent[0] >= 4 * 0.6 - 0.1, "as far as the other's callbacks took no time"
    for epoch in run.epochs:
        *phases, seconds = epoch.ranks.values()
        for rank, whole in enumerate(seconds):
            assert 0 < sum(phase[rank] for phase in phases) <= whole + 0.01, epoch
    assert run.end == "finished"
    assert first["slow"][0] in [one.text for one in run.occurrences if one.what == "warning"]


def test_run_dir(results: Results, folder: Path) -> None:
    ranks = results.of("case_run_dir")
    run_dir = folder / "runs" / "one"
    assert sorted(p.name for p in run_dir.iterdir()) == [
        "config.json",
        "events.jsonl",
        "metrics.csv",
        "model.keras",
    ]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["workers"] == 2
    assert config["global_batch_size"] == 6
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    history = ranks[0]["history"]
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    for name in ("loss", "val_loss"):
        assert [float(row[name]) for row in rows] == history[name]
    assert all(float(row["examples_per_second"]) > 0 for row in rows)
    run = read_run(run_dir)
    for name in ("loss", "val_loss"):
        # Six digits of them.
        assert [epoch.values[name] for epoch in run.epochs] == pytest.approx(history[name], 1e-5)
    assert [epoch.step for epoch in run.epochs] == [run.steps // 3 * n for n in (1, 2, 3)]
    for found in ranks:
        assert "contains another run" in found["again"]
    assert [found["tracked"] for found in ranks] == [[0, 6, 12, 18], []]


@pytest.mark.slow
def test_learning_rate(results: Results) -> None:
    for found in results.of("case_learning_rate"):
        assert found["none"] == pytest.approx(0.05)
        assert found["linear"] == pytest.approx(0.1)
        assert found["sqrt"] == pytest.approx(0.05 * 2**0.5)
        # Half an epoch of 6 steps: three rises from 0, or from the unscaled rate.
        assert found["warm-up none"] == pytest.approx([0.05 / 3, 0.1 / 3, *[0.05] * 4])
        rises = [0.05 + 0.05 / 3, 0.05 + 0.1 / 3]
        assert found["warm-up linear"] == pytest.approx([*rises, *[0.1] * 4])
        assert "schedule" in found["scale"]
        assert "schedule" in found["warm"]
        assert found["schedule"] == pytest.approx(0.1 * 0.5**2)


@pytest.mark.slow
def test_progress_is_shown_on_rank_0(results: Results) -> None:
    first, second = results.of("case_progress")
    silent, bar, line = first
    assert silent == ""
    for shown in (bar, line):  # Without a terminal there is no view.
        assert "val_loss" in shown
        assert "examples/s" in shown
        assert shown.count("\n") == 1
    assert second == ["", "", ""]
