"""A Trainer in an elastic job: a worker is killed, one comes, one leaves, and nothing is lost or trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from launch import ROOT, program

SCRIPT = str(ROOT / "tests" / "ranks" / "elastic_trainer.py")
STEPS = 30
SECONDS = 150
ENVIRON = os.environ | {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": str(ROOT),
}


@pytest.mark.slow
def test_workers_die_come_and_leave(tmp_path: Path) -> None:
    alone, elastic = tmp_path / "alone", tmp_path / "elastic"
    alone.mkdir()
    elastic.mkdir()
    show(elastic, 2)
    find = tmp_path / "find.sh"
    find.write_text(f"#!/bin/sh\ncat {elastic}/hosts\n")
    find.chmod(0o755)
    command = [program("hvdtrain"), "run", "-np", "2", "--min-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", str(find), "--log-dir", str(tmp_path / "logs")]
    job = subprocess.Popen(
        [*command, SCRIPT, str(elastic), "0.3"],
        env=ENVIRON,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # When the second worker has been replaced a third one comes; when that trains, one leaves.
        wait(job, lambda: any(one["step"] >= 9 for one in events(elastic)))
        show(elastic, 3)
        wait(job, lambda: any(one["size"] == 3 for one in events(elastic)))
        show(elastic, 2)
        _, stderr = job.communicate(timeout=SECONDS)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait()
    assert job.returncode == 0, stderr
    assert stderr.count("workers have joined or left: restarting the script") == 3, stderr

    subprocess.run(
        [sys.executable, SCRIPT, str(alone), "0"], env=ENVIRON, check=True, timeout=SECONDS
    )
    before, after = (
        keras.models.load_model(run / "run" / "model.keras") for run in (alone, elastic)
    )
    for one, same in zip(before.get_weights(), after.get_weights(), strict=True):
        # Sums of float32 in another order.
        np.testing.assert_allclose(same, one, rtol=1e-5, atol=1e-6)

    # Of the killed worker's steps the one is lost that was not saved. When workers come or go otherwise, none is.
    first = [one for one in events(elastic) if one["rank"] == 0]
    assert [one["step"] for one in first] == [*range(9), *range(7, STEPS)]
    sizes = [one["size"] for one in first]
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 3, 2)


def show(folder: Path, workers: int) -> None:
    """Change what the discovery script prints."""
    (folder / "hosts.new").write_text(f"localhost:{workers}\n")
    (folder / "hosts.new").rename(folder / "hosts")


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(job: subprocess.Popen[str], until: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
