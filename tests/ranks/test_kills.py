"""SIGKILL of a rank, of the launcher, of everything, at random moments: the run that goes on ends as if undisturbed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch import ROOT, program

SCRIPT = str(ROOT / "tests" / "ranks" / "killed_training.py")
ENVIRON = os.environ | {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": str(ROOT),
}
KILLS = 20 if "HVDTRAIN_ALL_CASES" in os.environ else 1
"""Of each kind: all of them before a release."""
TRAINING_SECONDS = 5.0
SECONDS = 90
MARK = "KILLED_TRAINING"


def start(folder: Path) -> subprocess.Popen[str]:
    for old in folder.glob("pid.[01]"):
        old.unlink()
    command = [program("hvdtrain"), "run", "-np", "2", "--controller", "gloo"]
    command += ["--log-dir", str(folder / f"logs-{uuid.uuid4().hex}"), SCRIPT, str(folder)]
    return subprocess.Popen(
        command, env=ENVIRON | {MARK: str(folder)}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def processes(folder: Path) -> list[psutil.Process]:
    """Of the job in this folder."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get(MARK) == str(folder):
                found.append(one)
    return found


def kill(job: subprocess.Popen[str], folder: Path, kind: str, after: float) -> bool:
    """Kill it so many seconds after the first step of its ranks; return whether it had not ended by then."""
    deadline = time.monotonic() + SECONDS
    while len(pids := list(folder.glob("pid.[01]"))) < 2:
        if job.poll() == 0:
            return False
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.02)
    time.sleep(after)
    if job.poll() is not None:
        return False
    if kind == "everything":
        for one in processes(folder):
            with suppress(psutil.Error):
                one.kill()
    else:
        with suppress(ProcessLookupError):
            pid = job.pid if kind == "launcher" else int(random.choice(pids).read_text())
            os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=SECONDS)
    while processes(folder):
        assert time.monotonic() < deadline + SECONDS, processes(folder)
        time.sleep(0.1)
    return job.returncode != 0


def result(folder: Path) -> list[object]:
    found: list[object] = json.loads((folder / "result").read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = start(folder)
    assert job.wait(SECONDS) == 0, job.communicate()
    return result(folder)


@pytest.mark.slow
def test_it_ends_as_if_undisturbed(undisturbed: list[object], tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    random.seed(seed)
    left = [kind for kind in ("rank", "launcher", "everything") for _ in range(KILLS)]
    random.shuffle(left)
    moments: list[tuple[str, float]] = []
    for folder in folders(tmp_path):
        ended = False
        while not ended:
            job = start(folder)
            kind = left[-1] if left else ""
            after = random.uniform(0, TRAINING_SECONDS)
            if left and kill(job, folder, kind, after):
                moments.append((left.pop(), after))
            else:
                _, stderr = job.communicate(timeout=SECONDS)
                assert job.returncode == 0, (moments, stderr)
                ended = True
        assert result(folder) == undisturbed, moments
        if not left:
            break
    print(len(moments), "kills")


def folders(parent: Path) -> Iterator[Path]:
    for number in itertools.count():
        folder = parent / str(number)
        folder.mkdir()
        yield folder
