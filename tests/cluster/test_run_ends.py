"""However a run ends, it ends soon, says why once, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import RANK, SECONDS, Job

SLEEP = RANK + "open(f'started.{rank}', 'w').close()\ntime.sleep(600)\n"
TRAIN = (
    RANK
    + """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
step = 0
while True:
    hvd.allreduce(tf.ones(1000), name="x")
    step += 1
    if step == 10:
        open(f"started.{rank}", "w").close()
"""
)


@pytest.mark.parametrize(
    ("script", "number", "exit_code"),
    [(TRAIN, signal.SIGINT, 130), (SLEEP, signal.SIGTERM, 143)],
    ids=["ctrl-c while training", "sigterm while sleeping"],
)
def test_signals_end_all_ranks(
    start: Callable[..., Job], controller: str, script: str, number: signal.Signals, exit_code: int
) -> None:
    job = start(script, "-np", "2", "--controller", controller)
    job.wait_for("started", 2)
    assert len(job.left()) >= 4
    os.kill(job.process.pid, number)
    asked = time.monotonic()
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert time.monotonic() - asked < 5
    assert job.left() == []
    assert job.process.returncode == exit_code
    assert stdout == ""
    assert stderr.strip() == f"{number.name}: stopping all workers (repeat to stop at once)"


@pytest.mark.slow
def test_a_closed_terminal_ends_ranks_whose_libraries_handle_sighup(
    start: Callable[..., Job],
) -> None:
    """UCX does, which Open MPI loads; the script itself wants no grace."""
    job = start(TRAIN, "-np", "2", "--controller", "mpi")
    job.wait_for("started", 2)
    os.kill(job.process.pid, signal.SIGHUP)
    asked = time.monotonic()
    job.process.communicate(timeout=SECONDS)
    assert time.monotonic() - asked < 5
    assert job.process.returncode == 129
    assert job.left() == []


def test_ranks_that_ignore_sigterm_are_killed(start: Callable[..., Job]) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    job = start(deaf, "-np", "2", "--controller", "gloo")
    job.wait_for("started", 2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    job.process.communicate(timeout=SECONDS)
    assert time.monotonic() - asked < 5
    assert job.left() == []


def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Job]) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    job = start(deaf, "-np", "2", "--controller", "gloo")
    job.wait_for("started", 2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    time.sleep(0.3)
    os.kill(job.process.pid, signal.SIGINT)
    job.process.communicate(timeout=SECONDS)
    assert time.monotonic() - asked < 2
    assert job.left() == []


def test_ranks_do_not_outlive_a_killed_launcher(start: Callable[..., Job], controller: str) -> None:
    job = start(SLEEP, "-np", "2", "--controller", controller)
    job.wait_for("started", 2)
    job.process.kill()
    deadline = time.monotonic() + 20
    while job.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.left() == []


FAILURES = {
    "a rank raises": (
        "def deep():\n    raise ValueError('bad <data> é')\nif rank == 1:\n    deep()\n",
        1,
        "rank 1 failed:\nTraceback (most recent call last):\n"
        '  File "{folder}/train.py", line 6, in <module>\n    deep()\n'
        "  File \"{folder}/train.py\", line 4, in deep\n    raise ValueError('bad <data> é')\n"
        "ValueError: bad <data> é\n",
    ),
    "a rank exits": (
        "if rank == 1:\n    sys.exit(3)\n",
        3,
        "rank 1 ended with exit code 3\n",
    ),
    "a rank exits with a message": (
        "if rank == 1:\n    sys.exit('no data here')\n",
        1,
        "rank 1 failed: no data here\n",
    ),
    "a rank is killed": (
        "if rank == 1:\n    os.kill(os.getpid(), 9)\n",
        137,
        "rank 1 was killed by SIGKILL (out of memory?)\n",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_failure_of_one_rank(start: Callable[..., Job], controller: str, case: str) -> None:
    script, exit_code, message = FAILURES[case]
    job = start(RANK + script + "time.sleep(600)\n", "-np", "2", "--controller", controller)
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert job.left() == []
    assert job.process.returncode == exit_code
    assert stdout == ""
    said, _, logs = stderr.rpartition("logs of all workers: ")
    message = message.replace("{folder}", str(job.folder))
    assert said == message
    if case == "a rank raises":
        assert (
            message.split(":\n", 1)[1] in (job.folder / logs.strip() / "rank.1/stderr").read_text()
        )


def test_a_failure_ends_ranks_that_ignore_sigterm(start: Callable[..., Job]) -> None:
    """Also when the failed rank's own exit functions never return."""
    script = (
        "import atexit, signal, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "atexit.register(threading.Event().wait)\n"
        "if rank == 1:\n    raise ValueError('bad')\n"
        "time.sleep(600)\n"
    )
    job = start(RANK + script, "-np", "2", "--controller", "gloo")
    _, stderr = job.process.communicate(timeout=40)
    assert job.process.returncode == 1
    assert "ValueError: bad\nlogs of all workers: " in stderr
    assert job.left() == []


def test_ctrl_c_before_the_ranks_start(start: Callable[..., Job], controller: str) -> None:
    job = start(SLEEP, "-np", "2", "--controller", controller)
    time.sleep(1.0)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    job.process.communicate(timeout=SECONDS)
    assert time.monotonic() - asked < 5
    assert job.process.returncode == 130
    assert job.left() == []


def test_an_error_of_hvdtrain_on_all_ranks_is_one_message(
    start: Callable[..., Job], controller: str
) -> None:
    script = (
        "from hvdtrain import UsageError\nraise UsageError('the arrays differ in length: 3, 4')\n"
    )
    job = start(script, "-np", "2", "--controller", controller)
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 2
    assert stderr.count("the arrays differ in length: 3, 4") == 1
    assert "Traceback" not in stderr
    assert job.left() == []


def test_the_cause_not_what_follows_from_it(start: Callable[..., Job], controller: str) -> None:
    """Rank 0 fails as well, because rank 1 is gone; rank 1 is the one to be told about."""
    script = (
        "import tensorflow as tf, horovod.tensorflow as hvd\nhvd.init()\n"
        "hvd.allreduce(tf.ones(1), name='a')\n"
        "if hvd.rank() == 1:\n    raise KeyError('label')\n"
        "hvd.allreduce(tf.ones(1), name='b')\n"
    )
    job = start(script, "-np", "2", "--controller", controller)
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    # Before it TensorFlow may warn of rank 0's allreduce, which fails once rank 1 is gone.
    assert "\nrank 1 failed:\nTraceback" in f"\n{stderr}"
    assert stderr.count("Traceback") == 1
    assert "KeyError: 'label'\nlogs of all workers: " in stderr
    assert job.left() == []


@pytest.mark.slow
def test_a_launcher_that_ends_long_after_its_ranks(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """mpirun does under load; nothing of the launch counts as what the script left behind."""
    real = Path(sys.executable).with_name("mpirun")
    if not real.exists():
        pytest.skip("needs the Open MPI of the wheel")
    (tmp_path / "bin").mkdir()
    late = tmp_path / "bin/mpirun"
    late.write_text(f'#!/bin/sh\n"{real}" "$@"\ncode=$?\ntouch late\nsleep 6\nexit $code\n')
    late.chmod(0o755)
    path = f"{late.parent}{os.pathsep}{real.parent}{os.pathsep}{os.environ['PATH']}"
    # Watched for some seconds, as real ranks are.
    script = RANK + "time.sleep(4)\nprint('ran', flush=True)\n"
    job = start(script, "-np", "2", "--controller", "mpi", PATH=path)
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert (job.process.returncode, stdout, stderr) == (0, "ran\n", "")
    assert (tmp_path / "late").exists()
