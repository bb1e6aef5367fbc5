"""A frozen rank ends its run within the limit, and is named, whatever it was doing and whoever launched it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hanging import ALL_CASES, EXIT_HANG, LIMIT, PHASES, SCRIPT, assert_named
from jobs import RANK, SECONDS, Job, user_environment

SOME = [
    *((("mpi", "gloo")[n % 2], (1, 0, 1)[n % 3], phase) for n, phase in enumerate(PHASES)),
    ("mpi", 0, "init"),
    ("gloo", 1, "training"),
]


@pytest.mark.parametrize(
    ("controller", "stopped", "phase"),
    product(("mpi", "gloo"), (0, 1), PHASES) if ALL_CASES else SOME,
)
def test_a_frozen_rank(
    start: Callable[..., Job], controller: str, stopped: int, phase: str
) -> None:
    options = ("-np", "2", "--controller", controller, "--hang-timeout", LIMIT)
    job = start(SCRIPT, *options, after=(str(stopped), phase))
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == EXIT_HANG, stderr
    assert_named(stderr, stopped, phase)
    assert job.left() == []
    other = 1 - stopped
    stack = job.log(other, "stderr")
    assert "most recent call first" in stack, "that of the other rank"
    # Of imports within imports Python shows the last hundred calls.
    assert phase == "starting" or "train.py" in stack


WAITS = (
    RANK
    + """
import hvdtrain
if rank == 1:
    with hvdtrain.long_phase("download", minutes=30):
        time.sleep(12)
    print("downloaded", file=sys.stderr, flush=True)
    time.sleep(600)
hvdtrain.init()
"""
)


def test_a_rank_that_never_calls_init(start: Callable[..., Job]) -> None:
    """What it announces with `long_phase` may take longer than the limit."""
    job = start(WAITS, "-np", "2", "--controller", "mpi", "--hang-timeout", LIMIT, "--all-ranks")
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == EXIT_HANG, stderr
    assert "downloaded" in stderr
    assert "rank 1 (process" in stderr
    assert "is missing: others have waited 3 s for it in hvdtrain.init()" in stderr
    assert job.left() == []


@pytest.mark.parametrize("phase", ["training", "init"])
def test_a_frozen_rank_under_plain_horovodrun(tmp_path: Path, phase: str) -> None:
    """The other one ends itself, which ends the job. Over MPI: with Gloo Horovod's own limits do it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    program = str(Path(sys.executable).with_name("horovodrun"))
    words = [program, "-np", "2", "--mpi", sys.executable, "train.py", "1", phase]
    environ = user_environment(HVDTRAIN_HANG_TIMEOUT="10")
    done = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    where = "hvdtrain.init()" if phase == "init" else "training, step"
    assert re.search(
        rf"rank 0 on host \S+ has made no progress for 10 s, in {re.escape(where)}", said
    )
    assert "most recent call first" in said


LEAVES = """
import hvdtrain, os, sys, tensorflow as tf
import horovod.tensorflow as hvd
hvdtrain.init()
for step in range(10**6):
    hvd.allreduce(tf.ones(4), name="sum")
    if step == 20 and hvd.rank() == 1:
        {leave}
"""


@pytest.mark.parametrize(
    ("leave", "says"),
    [
        ("os._exit(0)", "before the end of the script (os._exit?)"),
        ("sys.exit(0)", "missing: the script has ended there"),
    ],
)
def test_a_rank_that_leaves_early(
    start: Callable[..., Job], controller: str, leave: str, says: str
) -> None:
    job = start(LEAVES.format(leave=leave), "-np", "2", "--controller", controller)
    _, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1, stderr
    assert says in stderr
    assert "rank 1 " in next(line for line in stderr.splitlines() if says in line)


LEFT = (
    RANK
    + """
import subprocess
if rank == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("done")
"""
)


def test_what_a_script_leaves_behind_holds_no_run_open(
    start: Callable[..., Job], controller: str
) -> None:
    job = start(LEFT, "-np", "2", "--controller", controller)
    stdout, stderr = job.process.communicate(timeout=30)
    assert (job.process.returncode, stdout) == (0, "done\n")
    ended = "ended processes that the script left running: python"
    assert stderr.strip().startswith(ended)
    assert job.left() == []


SAVES = (
    RANK
    + """
import signal
def save(*_):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)
if {catches}:
    signal.signal(signal.SIGTERM, save)
open(f"started.{{rank}}", "w").close()
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(3)
    print("interrupted", flush=True)
"""
)


@pytest.mark.parametrize("catches", ["True", "rank == 0"])
def test_scripts_have_their_grace(start: Callable[..., Job], controller: str, catches: str) -> None:
    """Also when only one rank wants it."""
    job = start(SAVES.format(catches=catches), "-np", "2", "--controller", controller)
    job.wait_for("started", 2)
    job.process.terminate()
    stdout, _ = job.process.communicate(timeout=SECONDS)
    assert (job.process.returncode, stdout) == (143, "saved\n")
    assert job.left() == []


def test_ctrl_c_reaches_a_script_that_wants_it(start: Callable[..., Job], controller: str) -> None:
    job = start(SAVES.format(catches="False"), "-np", "2", "--controller", controller)
    job.wait_for("started", 2)
    job.process.send_signal(2)
    stdout, _ = job.process.communicate(timeout=SECONDS)
    assert (job.process.returncode, stdout) == (130, "interrupted\n")
    assert job.left() == []
