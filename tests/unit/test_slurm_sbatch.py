"""The batch scripts that `hvdtrain submit` writes: golden files, what is refused, how they end.

After a wanted change: HVDTRAIN_WRITE_GOLDEN=1 pytest tests/unit/test_slurm_sbatch.py, and read the difference.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_stand_in import play

from hvdtrain.errors import UsageError
from hvdtrain.launch.slurm.sbatch import JobRequest, batch_script, default_warning

GOLDEN = Path(__file__).with_name("golden")
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"nodes": 2, "tasks_per_node": 4},
    "all": {
        "command": ("hvdtrain", "run", "--env", "DATA=/a b", "train.py", "--name", "it's $HOME"),
        "job_name": "big run",
        "output": "logs/%x-%j.out",
        "nodes": 4,
        "tasks_per_node": 8,
        "gpus_per_node": "a100:8",
        "cpus_per_task": 12,
        "time": "1-12:00:00",
        "partition": "gpu",
        "account": "proj7",
        "qos": "long",
        "memory": "480G",
        "mail_type": "END,FAIL",
        "mail_user": "me@example.org",
        "directives": ("--constraint=nvlink", '--comment="two words"'),
        "warning_seconds": 300,
    },
    "requeue": {"time": "24:00:00", "warning_seconds": 120, "requeue": True},
    "array_requeue": {"array": "0-99%4", "warning_seconds": 60, "requeue": True},
}


def request_of(**changes: Any) -> JobRequest:
    values = {
        "command": ("hvdtrain", "run", "train.py"),
        "job_name": "train",
        "output": ".hvdtrain/jobs/%x-%j.out",
    }
    return JobRequest(**values | changes)


@pytest.mark.parametrize("name", REQUESTS)
def test_golden_scripts(name: str) -> None:
    text = batch_script(request_of(**REQUESTS[name]))
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("HVDTRAIN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


WORDS = st.lists(
    st.text(alphabet="ab '\"$`\\;&|\n#{}%*~=-", min_size=1, max_size=8), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that writes its arguments down."""
    path = tmp_path_factory.mktemp("bin") / "show me"
    path.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$0.said"\n')
    path.chmod(0o755)
    return path


@settings(max_examples=25)
@given(words=WORDS)
def test_no_word_of_the_user_means_anything_to_the_shell(show: Path, words: list[str]) -> None:
    for changes in ({}, {"warning_seconds": 60}, {"warning_seconds": 60, "requeue": True}):
        script = batch_script(request_of(command=(str(show), *words), **changes))
        done = subprocess.run(
            ["bash", "-c", script], env={"PATH": "/bin:/usr/bin", "SLURM_JOB_ID": "1"}
        )
        assert done.returncode == 0
        said = show.with_name("show me.said")
        assert said.read_text().split("\0")[:-1] == words


@given(st.text(min_size=1, max_size=20).filter(lambda text: not set("\n\0/") & set(text)))
def test_values_are_one_word_to_sbatch(name: str) -> None:
    line = next(
        line
        for line in batch_script(request_of(job_name=name)).split("\n")
        if line.startswith("#SBATCH --job-name=")
    )
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--job-name={name}"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "--nodes 0: must be at least 1"),
        ({"time": "1h"}, "--time '1h': expected minutes, H:MM:SS or D-HH:MM:SS"),
        ({"time": "1:2:3"}, "--time '1:2:3'"),
        ({"time": "9" * 5000}, "--time '999"),
        ({"array": "0..3"}, "--array '0..3': expected numbers and ranges"),
        ({"memory": "64 GB"}, "--mem '64 GB'"),
        ({"gpus_per_node": "a100"}, "--gpus-per-node 'a100': expected a number or TYPE:NUMBER"),
        ({"gpus_per_node": "0"}, "--gpus-per-node '0'"),
        ({"directives": ("constraint=a",)}, "--sbatch 'constraint=a': expected an option of sbatch"),
        ({"directives": ("--comment=a\nrm -rf x",)}, "contains a newline"),
        ({"job_name": "a\n#SBATCH --exclusive"}, "contains a newline"),
        ({"job_name": "exp/1"}, "--job-name 'exp/1': '/' would be a folder"),
        ({"directives": ("--array=0-3",)}, "--sbatch '--array=0-3': hvdtrain submit has its own option"),
        ({"directives": ("-a 0-3",)}, "own option for this: use --array"),
        ({"directives": ("--signal=TERM@9",)}, "own option for this: use --warning"),
        ({"directives": ("--requeue",)}, "own option for this: use --requeue"),
        ({"directives": ("--outpu=x",)}, "own option for this: use --output"),
        ({"directives": ("--no-req",), "requeue": True}, "--sbatch '--no-req': --requeue says the opposite"),
        ({"directives": ("--comment=a --output=x",)}, "own option for this: use --output"),
        ({"directives": ("-t60",)}, "own option for this: use --time"),
        ({"directives": ("--ntasks-per-node 4",)}, "own option for this: use --tasks-per-node"),
        (
            {"time": "2", "warning_seconds": 120},
            "--warning 120 is not shorter than --time 2, which is 120 seconds",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        request_of(**changes)
    assert said in str(error.value)


def test_each_gpu_has_a_task_with_cores_of_its_own() -> None:
    """Without tasks, Slurm would give all workers of a node the cores of one task."""
    line = "#SBATCH --ntasks-per-node="
    assert f"{line}4\n" in batch_script(request_of(gpus_per_node="a100:4"))
    assert f"{line}2\n" in batch_script(request_of(gpus_per_node="4", tasks_per_node=2))
    assert line not in batch_script(request_of(gpus_per_node="4", directives=("--ntasks=8",)))


def test_directives_that_begin_as_options_of_our_own() -> None:
    wanted = (
        "--gpus=4",
        "--ntasks=8",
        "--nodelist=a",
        "--time-min=5",
        "--mem-bind=local",
        "--no-requeue",
    )
    lines = batch_script(request_of(directives=wanted)).splitlines()
    assert [f"#SBATCH {one}" for one in wanted] == lines[4:10], lines


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("1", 30), ("3:00", 90), ("0:01:00", 30), ("0-1", 120), ("1-00:00:00", 120)),
        *((None, 120), ("UNLIMITED", 120), ("0", 120), ("0:00", 120)),
    ],
)
def test_the_warning_fits_the_time(time: str | None, seconds: int) -> None:
    assert default_warning(time) == seconds
    request_of(time=time, warning_seconds=seconds)


@pytest.mark.parametrize(
    ("seconds_left", "training", "requeued", "exit_code"),
    [
        (300, "trap 'exit 75' USR1", True, 75),  # Stops for the warning: requeued at once.
        (300, "trap 'exit 0' USR1", False, 0),  # Has finished.
        (11, "trap '' USR1", True, 143),  # Goes on: requeued 10 s before its end.
        (5, "trap '' USR1", True, 143),  # No time left.
        (300, "kill -TERM $PPID; trap 'exit 75' USR1", False, 75),  # Cancelled: stays ended.
    ],
)
def test_a_warned_script(
    slurm: Path, seconds_left: int, training: str, requeued: bool, exit_code: int
) -> None:
    play(slurm, "squeue", f"date --date='{seconds_left} seconds' +%FT%T")
    # A requeue ends the job, as Slurm does.
    play(slurm, "scontrol", f'echo "$@" >>{slurm}/requeued; kill $(cat {slurm}/pid)')
    play(
        slurm,
        "train",
        f"{training}\ntrap 'exit 143' TERM\necho $$ >pid.tmp; mv pid.tmp pid\n"
        "for i in {1..900}; do sleep 0.1; done",  # Longer than a busy machine may halt.
    )
    request = request_of(command=("./train",), warning_seconds=300, requeue=True)
    job = subprocess.Popen(
        ["bash", "-c", batch_script(request)],
        env={**os.environ, "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,  # Ends when the last process of the job ends.
    )
    while not (slurm / "pid").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == exit_code
    assert (slurm / "requeued").exists() == requeued
    if requeued:
        assert (slurm / "requeued").read_text().splitlines()[0] == "requeue 7"


def test_a_warning_before_the_number_of_the_training_is_known(slurm: Path) -> None:
    """What waits for the job's end starts first: $! is not the training then."""
    play(slurm, "squeue", "date --date='300 seconds' +%FT%T")
    play(slurm, "scontrol", f'echo "$@" >>{slurm}/requeued')
    play(slurm, "train", "trap 'exit 75' USR1\ntouch ready\nfor i in {1..900}; do sleep 0.1; done")
    script = batch_script(request_of(command=("./train",), warning_seconds=300, requeue=True))
    early = f"until [ -e {slurm}/ready ]; do sleep 0.1; done; kill -USR1 $$\nrun="
    head, line, tail = script.rpartition("\nrun=")
    assert line and tail.startswith("${run:-$!}\n")
    job = subprocess.run(
        ["bash", "-c", f"{head}\n{early}{tail}"],
        env={**os.environ, "SLURM_JOB_ID": "7", "run": "1"},  # A user may have a variable so named.
        timeout=60,
    )
    assert job.returncode == 75
    assert (slurm / "requeued").read_text() == "requeue 7\n"


def test_a_training_that_ends_at_once_has_finished(slurm: Path) -> None:
    """It has ended before the script looks whether it lives."""
    play(slurm, "squeue", "date --date='300 seconds' +%FT%T")
    play(slurm, "scontrol", f"touch {slurm}/requeued")
    play(slurm, "train", "trap 'exit 0' USR1\ntouch ready\nfor i in {1..900}; do sleep 0.1; done")
    script = batch_script(request_of(command=("./train",), warning_seconds=300, requeue=True))
    slow = 'kill() { builtin kill "$@"; local code=$?; sleep 1; return $code; }\n'
    with subprocess.Popen(
        ["bash", "-c", slow + script], env={**os.environ, "SLURM_JOB_ID": "7"}
    ) as job:
        while not (slurm / "ready").exists():
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
    assert not (slurm / "requeued").exists()


@pytest.mark.parametrize("answer", ["exit 1", "echo N/A", "echo"])
def test_ranks_may_save_where_slurm_does_not_tell_the_end(slurm: Path, answer: str) -> None:
    play(slurm, "squeue", answer)
    play(slurm, "scontrol", f"date +%s.%N >{slurm}/requeued")
    play(
        slurm,
        "train",
        "trap 'date +%s.%N >warned' USR1\ntouch ready\nwhile [ ! -e requeued ]; do sleep 0.1; done",
    )
    request = request_of(command=("./train",), warning_seconds=12, requeue=True)
    with subprocess.Popen(
        ["bash", "-c", batch_script(request)], env={**os.environ, "SLURM_JOB_ID": "7"}
    ) as job:
        while not (slurm / "ready").exists():
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        job.wait(20)
    requeued, warned = (float((slurm / name).read_text()) for name in ("requeued", "warned"))
    assert 1 < requeued - warned < 9, "10 s before the end, which is 12 s after the warning"
