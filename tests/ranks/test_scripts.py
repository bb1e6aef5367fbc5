"""The scripts that users copy: alone, under `hvdtrain run` and under plain horovodrun."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from launch import ROOT, program

SCRIPTS = ROOT / "scripts"
SECONDS = 240


def run(*command: str | Path) -> str:
    """Run a command as a user does in the clone; return what it printed on standard output."""
    foreign = ("HOROVOD_", "HVDTRAIN_", "OMPI_", "OMP_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    job = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def alone(script: str, *arguments: str | Path) -> str:
    return run(sys.executable, SCRIPTS / script, *arguments)


def hvdtrain_run(
    folder: Path,
    script: str,
    *arguments: str | Path,
    controller: str = "mpi",
    workers: int = 2,
    profile: str | None = None,
) -> str:
    options = ["-np", str(workers), "--controller", controller, "--log-dir", folder / "logs"]
    options += ["--profile", profile] if profile else []
    # Ranks without a core of their own take time from the others whenever they look for tensors.
    options += ["--cycle-time-ms", "3"] if workers > 2 else []
    return run(sys.executable, "-m", "hvdtrain.cli", "run", *options, SCRIPTS / script, *arguments)


def horovodrun(script: str, *arguments: str | Path, controller: str = "mpi") -> str:
    command = [program("horovodrun"), "-np", "2", f"--{controller}"]
    return run(*command, sys.executable, SCRIPTS / script, *arguments)


def values(output: str, name: str) -> list[float]:
    """Return the numbers behind `name` in what a script printed."""
    return [float(found) for found in re.findall(rf"\b{name} (\d+\.\d+)", output)]


def accuracy(output: str) -> float:
    """Return the accuracy that a script ends with; only one rank may say it."""
    (found,) = values(output, "validation accuracy")
    return found


def history(run_dir: Path) -> dict[str, list[float]]:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def test_digits_and_two_workers_are_one(tmp_path: Path) -> None:
    epochs = ("--epochs", "2")
    options = (*epochs, "--run-dir", tmp_path / "two")
    hvdtrain_run(tmp_path, "train_mnist.py", *options, profile="4-8")
    one = alone("train_mnist.py", *epochs, "--run-dir", tmp_path / "one")
    ones, twos = history(tmp_path / "one"), history(tmp_path / "two")
    assert accuracy(one) == pytest.approx(ones["val_accuracy"][-1], abs=5e-4)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert twos[name] == pytest.approx(ones[name], rel=1e-3), name
    assert keras.saving.load_model(tmp_path / "two" / "model.keras").count_params() > 0
    check_profile(tmp_path / "two" / "profile.json.gz", range(4, 9))


def check_profile(path: Path, steps: range) -> None:
    """Ranks of one machine, which read one clock."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    rows = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert [row.partition(" (")[0] for row in rows] == ["rank 0", "rank 1"]
    tracks = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    shown = [one for one in events if one["ph"] == "X"]
    bars = {
        (one["pid"], one["name"]): (one["ts"], one["ts"] + one["dur"])
        for one in shown
        if tracks[one["pid"], one["tid"]] == "steps"
    }
    assert [*bars] == [(rank, f"step {step}") for rank in range(2) for step in steps]
    for step in steps:
        # No tolerance: in each step the ranks wait for each other, to reduce the gradients.
        (begin_0, end_0), (begin_1, end_1) = (bars[rank, f"step {step}"] for rank in range(2))
        assert max(begin_0, begin_1) < min(end_0, end_1), "on one clock, the steps overlap"
    reductions = [one for one in shown if one["name"] == "MPI_ALLREDUCE"]
    assert len(reductions) >= len(steps)
    for one in reductions:
        assert tracks[one["pid"], one["tid"]].startswith("collectives")
        inside = [
            begin <= one["ts"] and one["ts"] + one["dur"] <= end
            for (rank, _), (begin, end) in bars.items()
            if rank == 0
        ]
        assert sum(inside) == 1, "rank 0, which records it, waits for it within a step"
    assert {one["pid"] for one in shown if "MatMul" in one["name"]} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "least"), [("train_mnist.py", 0.97), ("train_custom_loop.py", 0.97)]
)
def test_full_length(tmp_path: Path, script: str, least: float) -> None:
    assert accuracy(hvdtrain_run(tmp_path, script)) >= least


@pytest.mark.slow
def test_mnist_file_under_horovodrun_over_gloo(tmp_path: Path) -> None:
    """Bright squares in one of ten places stand for digits: they can be learnt in three epochs."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 640)
    x = rng.integers(0, 64, (640, 28, 28), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        image[label // 5 * 14 :, label % 5 * 5 :][:10, :5] = 255
    arrays = {"x_train": x[:512], "y_train": y[:512], "x_test": x[512:], "y_test": y[512:]}
    np.savez_compressed(tmp_path / "mnist.npz", **arrays)
    data = ("--data", tmp_path / "mnist.npz", "--epochs", "3", "--batch-size", "32")
    assert accuracy(horovodrun("train_mnist.py", *data, controller="gloo")) >= 0.95


@pytest.mark.slow
def test_table_and_two_workers_are_one(tmp_path: Path) -> None:
    short = ("--rows", "131072", "--epochs", "3", "--batch-size", "1000")
    one = alone("train_tabular.py", *short)
    two = hvdtrain_run(tmp_path, "train_tabular.py", *short)
    assert accuracy(two) >= 0.95
    assert accuracy(two) == pytest.approx(accuracy(one), abs=1e-3)
    losses = values(one, "validation loss")
    assert len(losses) == 1
    assert values(two, "validation loss") == pytest.approx(losses, rel=1e-3)


@pytest.mark.slow
def test_large_batches_and_two_workers_are_one(tmp_path: Path) -> None:
    options = ("--optimizer", "lars")
    two = accuracy(hvdtrain_run(tmp_path, "train_large_batch.py", *options))
    # Five seeds of one worker reach 0.956 to 0.983; the rate of small batches reaches 0.867 at best.
    assert two >= 0.94
    # Three of 360 digits, shown with three decimals: 90 steps let a difference of rounding grow.
    assert two == pytest.approx(accuracy(alone("train_large_batch.py", *options)), abs=0.0085)


@pytest.mark.slow
def test_own_loop_and_two_workers_are_one(tmp_path: Path) -> None:
    one = alone("train_custom_loop.py", "--epochs", "2")
    two = hvdtrain_run(tmp_path, "train_custom_loop.py", "--epochs", "2", controller="gloo")
    losses = values(one, "validation loss")
    assert len(losses) == 2
    assert values(two, "validation loss") == pytest.approx(losses, rel=1e-3)


@pytest.mark.slow
def test_horovod_style_under_horovodrun_at_full_length(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    assert accuracy(horovodrun("horovod_style.py", "--grow", "--checkpoint", file)) >= 0.96
    assert keras.saving.load_model(file).count_params() > 0


@pytest.mark.slow
def test_horovod_style_is_one_run(tmp_path: Path) -> None:
    given = ("horovod_style.py", "--epochs", "6")
    one = alone(*given)
    assert accuracy(one) >= 0.9
    losses = values(one, "val_loss:")
    assert len(losses) == 6
    # Printed with 4 digits, after epochs of Adam, which grows the rounding of sums.
    assert values(hvdtrain_run(tmp_path, *given), "val_loss:") == pytest.approx(losses, rel=1e-3)


@pytest.mark.slow
def test_model_parallel_in_any_layout_is_one(tmp_path: Path) -> None:
    """Four workers hold a quarter of the model each; two others go on from their file with sharded state."""
    script, one_epoch = "train_model_parallel.py", ("--epochs", "1")
    file = tmp_path / "first.keras"
    quarters = ("--tensor", "2", "--pipeline", "2", "--save", file)
    four = hvdtrain_run(tmp_path, script, *one_epoch, *quarters, workers=4)
    agree(four, alone(script, *one_epoch))
    two = hvdtrain_run(tmp_path, script, *one_epoch, "--shard-optimizer", "--load", file)
    agree(two, alone(script, *one_epoch, "--load", file))
    assert accuracy(two) > accuracy(four) >= 0.7


def agree(parallel: str, one: str) -> None:
    """An epoch of Adam grows the rounding of sums, 1e-7, as it divides small gradients by their size."""
    (loss,) = values(one, "validation loss")
    assert values(parallel, "validation loss") == [pytest.approx(loss, rel=1e-3)]
    # One of 360 examples may lie on the edge of two classes.
    assert accuracy(parallel) == pytest.approx(accuracy(one), abs=0.003)
