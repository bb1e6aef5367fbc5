"""Training with parameter servers: the numbers of one process, and what happens when processes are lost."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases.parameter_server import (
    BATCH,
    FAULT_BATCH,
    FAULT_EPOCHS,
    FAULT_ROWS,
    LEFT,
    OPTIMIZERS,
    ROWS,
    data,
)
from launch import ROOT
from server_job import SERVE, ServerJob, server_job

pytestmark = pytest.mark.slow

TABLE_ACCURACY = 0.97
"""Of the same table under Horovod."""
CASES = str(Path(__file__).parent / "cases" / "parameter_server.py")


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, ServerJob]:
    folder = tmp_path_factory.mktemp("equal")
    with server_job(folder, [CASES, "equal", str(folder)], workers=1, servers=2) as job:
        job.wait_for("EQUAL", seconds=240)
        for gate in ("gradient", "applied"):
            _wait_for_file(folder / f"{gate}.begun", job)
            time.sleep(0.5)
            _kill_worker(job)
            job.start("worker", 0, SERVE)
            (folder / f"{gate}.go").touch()
        job.wait_for("LEAVING")
        _kill_worker(job)
        (folder / "leave").touch()
        assert job.end(seconds=60) == LEFT, job.log("chief")
        ends = {job.end("ps", index, seconds=60) for index in (0, 1)}
        assert ends == {0}, "servers end with the chief"
    return json.loads((folder / "found.json").read_text()), folder, job


def _kill_worker(job: ServerJob) -> None:
    job.processes["worker", 0].send_signal(signal.SIGKILL)
    job.end("worker", 0)


def _wait_for_file(path: Path, job: ServerJob, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}: {job.log('chief')}"
        time.sleep(0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gets_the_numbers_of_one_process(name: str, equal: Any) -> None:
    """Embedding and Dense split over two servers; statistics, dropout, penalty, constraint, clipping, weights.

    One step at a time nothing is stale: only the order of sums differs.
    """
    found = equal[0][name]
    assert found["names"][0] == found["names"][1]
    assert max(found["differences"].values()) < 2e-5, found["differences"]
    assert found["iterations"] == 2 * -(-ROWS // BATCH)


def test_what_was_made_before_the_trainer_can_be_used_on(equal: Any) -> None:
    assert equal[0]["early"] == 6.0


def test_variables_are_on_all_servers(equal: Any) -> None:
    whole = {name: len(devices) for name, devices in equal[0]["lamb"]["devices"].items()}
    split = {name: len(devices) for name, devices in equal[0]["adam"]["devices"].items()}
    assert set(whole.values()) == {1}, "an optimizer that looks at whole weights keeps them whole"
    assert {name for name, parts in split.items() if parts == 2} == {
        "embedding/embeddings",
        "dense/kernel",
        "dense_1/kernel",
    }
    devices = [d for devices in equal[0]["adam"]["devices"].values() for d in devices]
    assert {device.split("/device")[0] for device in devices} == {
        "/job:ps/replica:0/task:0",
        "/job:ps/replica:0/task:1",
    }


def test_plain_keras_loads_the_saved_model(equal: Any) -> None:
    _, folder, _ = equal
    model = keras.saving.load_model(folder / "model.keras")
    np.testing.assert_allclose(
        model.predict(data()[0], verbose=0), np.load(folder / "outputs.npy"), atol=1e-6
    )
    assert int(model.optimizer.iterations) == 2 * -(-ROWS // BATCH)
    assert type(model.optimizer) is keras.optimizers.AdamW
    assert all(np.any(v.numpy()) for v in model.optimizer.variables), "momenta are there"


@pytest.mark.parametrize("name", ["before fit", "after fit"])
def test_a_loaded_model_goes_on_as_the_saved_one(name: str, equal: Any) -> None:
    found = equal[0]["loading"]
    assert found["moved"] > 1e-3
    assert found[name]["loaded"] == 0
    assert found[name]["trained on"] < 1e-6
    assert found[name]["iterations"] == 3 * -(-ROWS // BATCH)
    assert found[name]["devices"] == 2


def test_a_step_whose_worker_dies_is_applied_once(equal: Any) -> None:
    """It died with one gradient missing, and, in the next attempt, when all weights were updated."""
    found = equal[0]["interrupted"]
    assert found["difference"] < 1e-6
    assert found["count"] == [BATCH]
    assert equal[2].log("chief").count("Worker 0 is lost") == 2


def test_what_workers_cannot_do_is_refused(equal: Any) -> None:
    assert set(equal[0]["refused"]) == {
        "gradient_accumulation_steps",
        "run_eagerly",
        "jit_compile",
        "loss_scale_factor",
    }
    for name, message in equal[0]["refused"].items():
        assert name in message


def test_digits_and_a_table_are_learnt_asynchronously(tmp_path: Path) -> None:
    """To the same quality as under Horovod, by scripts that know nothing of it."""
    command = ["run", "--strategy", "parameter-server", "--workers", "2", "--ps", "2"]
    script = [CASES, "scripts", str(tmp_path)]
    foreign = ("HOROVOD_", "HVDTRAIN_", "OMPI_", "OMP_", "TF_")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hvdtrain.cli",
            *command,
            "--log-dir",
            str(tmp_path / "logs"),
            *script,
        ],
        env={k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"validation accuracy (\d\.\d+)", done.stdout)
    assert len(found) == 2, done.stdout
    digits, table = map(float, found)
    assert digits >= 0.97
    assert abs(table - TABLE_ACCURACY) <= 0.005
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert int(model.optimizer.iterations) == 30 * 45


def test_a_lost_worker_comes_back_and_a_lost_server_ends_the_run(tmp_path: Path) -> None:
    """The second worker is started with the training script, as cluster managers do."""
    script = [CASES, "faults", str(tmp_path)]
    with server_job(tmp_path, script, workers=2, servers=2, by_script=1) as job:
        job.wait_for("FIT first(.|\n)*BEGIN 1")
        time.sleep(random.uniform(0, 0.5))
        job.processes["worker", 0].send_signal(signal.SIGKILL)
        job.end("worker", 0)
        time.sleep(1)
        job.start("worker", 0, SERVE)
        job.wait_for("FIT second")
        found = json.loads((tmp_path / "found.json").read_text())
        assert "Worker 0 is lost" in job.log("chief")
        assert found["history"]["count"] == [FAULT_ROWS] * FAULT_EPOCHS
        assert found["iterations"] == -(-FAULT_ROWS // FAULT_BATCH) * FAULT_EPOCHS
        job.wait_for("FIT second(.|\n)*BEGIN 2")
        job.processes["ps", 1].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        assert job.end(seconds=90) == 1
        print(f"ended {time.monotonic() - begin:.1f} s after the server")
        log = job.log("chief")
        assert log.count(f"Parameter server 1 ({job.cluster['ps'][1]}) is lost") == 1, log
        assert "Traceback" not in log
        assert [job.end(*key, seconds=60) for key in (("worker", 0), ("worker", 1), ("ps", 0))] == [
            *(0, 0, 0)
        ]
    with (tmp_path / "second" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    assert {float(row["count"]) for row in rows} == {FAULT_ROWS}
    assert keras.saving.load_model(tmp_path / "saved.keras", compile=False).count_params()
