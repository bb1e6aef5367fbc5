"""What a user sees of a run that ends well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


HOSTILE = (
    RANK
    + """
for number in range(100_000):
    print(number)
print("in [1,1]<stdout>:side", "[0]<stdout>:x")
print("[1,0]<stdout>:front [0]<stderr+>:y", end="")
sys.stdout.flush()
os.write(2, b"x" * 1_000_000 + bytes(range(128)))
"""
)


def test_nothing_that_ranks_write_is_lost_or_taken_for_a_tag(
    start: Callable[..., Job], controller: str
) -> None:
    """mpirun loses some of many short lines, and marks pieces of lines; a long line has no end to wait for."""
    job = start(HOSTILE, "-np", "2", "--controller", controller, "--log-dir", "logs")
    stdout, _ = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 0
    numbers = "".join(f"{number}\n" for number in range(100_000))
    assert stdout == (
        f"{numbers}in [1,1]<stdout>:side [0]<stdout>:x\n[1,0]<stdout>:front [0]<stderr+>:y"
    )
    for rank in (0, 1):
        folder = job.folder / f"logs/rank.{rank}"
        assert (folder / "stdout").read_text() == stdout
        assert (folder / "stderr").read_bytes() == b"x" * 1_000_000 + bytes(range(128))


ENVIRONMENT = (
    RANK
    + "import json, pathlib\n"
    + "pathlib.Path(f'{sys.argv[1]}.{rank}').write_text(json.dumps([sys.argv, dict(os.environ)]))\n"
)
_TOLD = re.compile(r"(HOROVOD|OMP|TF|NCCL|OMPI_MCA_mpi|OMPI_COMM_WORLD)_\w+|PYTHON\w+|PATH|A|B")


def told(folder: Path, name: str) -> list[tuple[list[str], dict[str, str]]]:
    """Of each of two ranks: its arguments after the first, and what of its environment it was told."""
    found = []
    for rank in (0, 1):
        argv, environ = json.loads((folder / f"{name}.{rank}").read_text())
        kept = {
            name: value
            for name, value in environ.items()
            if _TOLD.fullmatch(name) and name != "HOROVOD_GLOO_RENDEZVOUS_PORT"
        }
        found.append((argv[2:], kept))
    return found


def test_the_printed_command_starts_the_same_ranks(tmp_path: Path, controller: str) -> None:
    """By plain horovodrun, which is not what hvdtrain run starts."""
    (tmp_path / "train.py").write_text(ENVIRONMENT)
    options = ["-np", "2", "--controller", controller, "--fusion-threshold-mb", "3"]
    options += ["--env", "A=b 'c", "--env", "B"]
    user = {"B": "here", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_LOG_LEVEL": "warning"}

    def output(*words: str) -> str:
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=user_environment(**user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    hvdtrain_run = (sys.executable, "-m", "hvdtrain.cli", "run", *options)
    output(*hvdtrain_run, "train.py", "launched", "a; b")
    printed = output(*hvdtrain_run, "--dry-run", "train.py", "pasted", "a; b")
    assert re.match(r"env .*\bhorovodrun -np 2 ", printed)
    output("/bin/sh", "-c", printed)
    launched = told(tmp_path, "launched")
    assert launched == told(tmp_path, "pasted")
    arguments, environ = launched[1]
    assert (arguments, environ["A"], environ["B"]) == (["a; b"], "b 'c", "here")
    assert environ["HOROVOD_FUSION_THRESHOLD"] == str(3 * 2**20)


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
