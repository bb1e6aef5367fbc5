"""What runs can be listed, read and ended, and a run that failed goes on by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import RANK, SECONDS, Job, user_environment
from slurm_cluster import SlurmCluster

HVDTRAIN = (sys.executable, "-P", "-m", "hvdtrain.cli")
STEPS = (
    RANK
    + """
from hvdtrain.worker.heartbeat import beat
print("line of rank", rank, flush=True)
open(f"started.{rank}", "w").close()
for step in range(10**6):
    beat("training", step)
    time.sleep(0.1)
"""
)


def hvdtrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HVDTRAIN, *arguments],
        cwd=folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def listed(folder: Path, command: str) -> dict[str, Any]:
    """The job of `hvdtrain ps` whose command has this word, once its ranks have been seen training."""
    deadline = time.monotonic() + 30
    while True:
        done = hvdtrain(folder, "ps", "--json")
        assert done.returncode == 0, done.stderr
        jobs = [json.loads(line) for line in done.stdout.splitlines()]
        for job in jobs:
            if command in job["command"] and job["status"] and job["status"]["step"]:
                found: dict[str, Any] = job
                return found
        assert time.monotonic() < deadline, jobs
        time.sleep(0.2)


def test_a_run_on_this_machine(start: Callable[..., Job], tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}"
    secret = "--password=hunter2"
    job = start(STEPS, "-np", "2", "--controller", "gloo", after=(mark, secret))
    job.wait_for("started", 2)
    one = listed(tmp_path, mark)
    assert (one["kind"], one["state"], one["status"]["ranks"]) == ("run", "running", 2)
    assert one["status"]["phase"] == "training"
    assert one["seconds"] > 0
    table = hvdtrain(tmp_path, "ps").stdout.splitlines()
    assert table[0].split() == ["JOB", "KIND", "STATE", "RANKS", "PHASE", "STEP", "TIME", "COMMAND"]
    assert any(line.startswith(one["name"]) and mark in line for line in table)
    assert "hunter2" not in "".join(table)
    assert hvdtrain(tmp_path, "logs").stdout == "line of rank 0\n"
    assert hvdtrain(tmp_path, "logs", one["name"], "--rank", "1").stdout == "line of rank 1\n"
    wrong = hvdtrain(tmp_path, "logs", one["name"], "--rank", "7")
    assert wrong.returncode == 2
    assert "--rank 7: no such rank in" in wrong.stderr
    assert "available: 0, 1" in wrong.stderr
    following = subprocess.Popen(
        [*HVDTRAIN, "logs", "-f", one["name"]],
        cwd=tmp_path, env=user_environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    unknown = hvdtrain(tmp_path, "stop", "nonsense")
    assert (unknown.returncode, "nonsense: no such job; running: " in unknown.stderr) == (2, True)
    done = hvdtrain(tmp_path, "stop", one["name"][:6])
    assert (done.returncode, done.stdout) == (0, f"{one['name']} has ended\n")
    assert job.process.wait(10) == 143
    assert following.communicate(timeout=10)[0] == "line of rank 0\n"
    assert job.left() == []
    assert hvdtrain(tmp_path, "logs").stdout == "line of rank 0\n", "also after its end"


def test_a_slurm_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    submit = ("submit", "--nodes", "2", "--tasks-per-node", "1", "--time", "5", "train.py")
    name = slurm.run(*HVDTRAIN, *submit, cwd=tmp_path).strip()
    deadline = time.monotonic() + SECONDS
    while True:
        jobs = map(json.loads, slurm.run(*HVDTRAIN, "ps", "--json", cwd=tmp_path).splitlines())
        found = [job for job in jobs if job["name"] == name]
        if found and found[0]["status"] and found[0]["status"]["step"]:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert (found[0]["kind"], found[0]["state"], found[0]["status"]["ranks"]) == (
        "slurm",
        "running",
        2,
    )
    assert slurm.run(*HVDTRAIN, "logs", name, cwd=tmp_path) == "line of rank 0\n"
    assert slurm.run(*HVDTRAIN, "stop", name, cwd=tmp_path) == f"{name} has ended\n"
    assert slurm.left(seconds=10) == []


FAILS = (
    RANK
    + """
from hvdtrain.worker.heartbeat import beat
tries = len(open("tries").read()) if os.path.exists("tries") else 0
if rank == 0:
    open("tries", "a").write("x")
beat("training", 3 if tries < {useful} else 0)
time.sleep(2.5)
if tries < {failures}:
    sys.exit(7)
print("done", flush=True)
"""
)


@pytest.mark.parametrize(
    "options",
    [
        ["-np", "1"],
        ["--strategy", "central-storage", "-np", "2"],
        ["--strategy", "parameter-server", "--workers", "1"],
    ],
)
def test_a_run_that_fails_is_started_again(start: Callable[..., Job], options: list[str]) -> None:
    job = start(FAILS.format(useful=9, failures=2), *options, "--restarts", "3")
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert (job.process.returncode, stdout) == (0, "done\n")
    assert "restarting (1 of 3): the run failed with exit code 7 after 3 steps" in stderr
    assert "restarting (2 of 3)" in stderr and "(3 of 3)" not in stderr


def test_but_not_for_ever_and_not_without_progress(start: Callable[..., Job]) -> None:
    job = start(FAILS.format(useful=1, failures=9), "-np", "1", "--restarts", "5")
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 7
    assert stderr.count("restarting (") == 1
