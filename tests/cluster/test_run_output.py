"""What a user sees of a run that ends well."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

from jobs import RANK, SECONDS, Job, user_environment

HELLO = (
    RANK
    + """
import warnings
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
print("sum", hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy(), sys.argv[1:], sys.stdout.isatty())
print("threads", tf.config.threading.get_intra_op_parallelism_threads(),
      os.environ["TF_NUM_INTRAOP_THREADS"], __name__, sys.path[0] == os.getcwd())
print("unfinished", end="")
warnings.warn("careful")
"""
)


def test_rank_0_is_shown_as_if_alone(start: Callable[..., Job], controller: str) -> None:
    job = start(HELLO, "-np", "2", "--controller", controller, "--log-dir", "logs")
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 0
    lines = stdout.split("\n")
    assert lines[0] == "sum [2.] [] False"
    assert lines[1].endswith(" __main__ True")
    assert lines[2:] == ["unfinished"]
    shown = [line.removeprefix("[1] ") for line in stderr.splitlines()]
    assert len(shown) == 2
    assert shown[0].endswith("UserWarning: careful")
    for rank in (0, 1):
        assert (job.folder / f"logs/rank.{rank}/stdout").read_text() == stdout
        assert "UserWarning: careful" in (job.folder / f"logs/rank.{rank}/stderr").read_text()
    assert job.left() == []


def test_the_printed_command_does_the_same(start: Callable[..., Job], controller: str) -> None:
    script = (
        RANK
        + "print('rank', rank, sys.argv[1:], os.environ['HOROVOD_STALL_SHUTDOWN_TIME_SECONDS'])\n"
    )
    job = start(script, "-np", "1", "--controller", controller)
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert (job.process.returncode, stdout, stderr) == (0, "rank 0 [] 50\n", "")
    printed = subprocess.run(
        [
            *(sys.executable, "-m", "hvdtrain.cli", "run", "--dry-run"),
            *("-np", "1", "--controller", controller, "train.py"),
        ],
        cwd=job.folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pasted = subprocess.run(
        ["/bin/sh", "-c", printed],
        cwd=job.folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    ).stdout
    # horovodrun leaves its tags in, wherever it read a piece of a line.
    assert re.sub(r"\[(1,)?0\]<stdout>:", "", pasted) == stdout


def test_all_ranks_on_demand(start: Callable[..., Job]) -> None:
    script = RANK + "print('rank', rank)\n"
    job = start(script, "-np", "3", "--controller", "gloo", "--all-ranks")
    stdout, _ = job.process.communicate(timeout=SECONDS)
    assert sorted(stdout.splitlines()) == [f"[{rank}] rank {rank}" for rank in range(3)]


def test_a_launcher_that_fails_is_quoted(start: Callable[..., Job]) -> None:
    job = start("", "-np", "1", "--controller", "mpi", "--mpi-args=--no-such-option 1")
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode != 0
    assert stderr.startswith(f"horovodrun failed (exit code {job.process.returncode}):\n")
    assert "no-such-option" in stderr
    assert job.left() == []


def test_an_interface_that_is_not_there(start: Callable[..., Job]) -> None:
    job = start("", "-np", "1", "--controller", "gloo", "--network-interfaces", "none0")
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    assert stderr.startswith("this host has no network interface none0: it has ")
    assert job.left() == []
