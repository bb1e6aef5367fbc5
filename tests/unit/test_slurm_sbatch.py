"""The batch scripts that `hvdtrain submit` writes: golden files, what is refused, how jobs are read.

After a wanted change: HVDTRAIN_WRITE_GOLDEN=1 pytest tests/unit/test_slurm_sbatch.py, and read the difference.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cli.command_table import main
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.slurm.job_queue import follow_job, read_states, submit_job
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
        ({"directives": ("--no-req",)}, "own option for this: use --requeue, or nothing"),
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


def test_directives_that_begin_as_options_of_our_own() -> None:
    wanted = ("--gpus=4", "--ntasks=8", "--nodelist=a", "--time-min=5", "--mem-bind=local")
    lines = batch_script(request_of(directives=wanted)).splitlines()
    assert [f"#SBATCH {one}" for one in wanted] == lines[4:9], lines


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


SHOWN = (
    "JobId=7 JobName=a b UserId=root(0) JobState={state} Reason={reason} Requeue=1 Restarts={restarts} "
    "ExitCode={code} Command=/x y/t.sh StdErr=/x y/out.7 StdOut=/x y/out.7 Power= \n"
)


def shown(state: str, code: str = "0:0", reason: str = "None", restarts: int = 0) -> str:
    return SHOWN.format(state=state, code=code, reason=reason, restarts=restarts)


@pytest.mark.parametrize(
    ("state", "code", "result"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("OUT_OF_MEMORY", "0:125", 253),
    ],
)
def test_how_jobs_end(state: str, code: str, result: int) -> None:
    (job,) = read_states(shown(state, code))
    assert (job.name, job.state, job.result) == ("7", state, result)
    assert job.output == Path("/x y/out.7")


def test_the_tasks_of_an_array() -> None:
    text = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=0 JobState=RUNNING\n"
        "JobId=7 ArrayJobId=7 ArrayTaskId=1-3 JobState=PENDING\n"
    )
    assert [job.name for job in read_states(text)] == ["7_0", "7_1-3"]
    assert read_states("slurm_load_jobs error: Invalid job id specified\n") == []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that play Slurm; nothing else of Slurm is in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("hvdtrain.launch.slurm.job_queue.POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def play(slurm: Path, name: str, script: str) -> None:
    path = slurm / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_a_job_is_followed_over_its_restart(
    slurm: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = slurm / "out.7"
    steps = [
        shown("PENDING", reason="Resources"),
        shown("RUNNING"),
        shown("PREEMPTED", "0:15"),
        shown("PENDING", reason="BeginTime", restarts=1),
        shown("RUNNING", restarts=1),
        *[shown("FAILED", "3:0", restarts=1)] * 2,
    ]
    for number, step in enumerate(steps):
        (slurm / f"step{number}").write_text(step.replace("/x y/out.7", str(output)))
    play(
        slurm,
        "scontrol",
        f"cd {slurm}; n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n\n"
        f"[ $n = 1 ] && echo first >>{output}; [ $n = 4 ] && printf 'sec\\xff' >>{output}\ncat step$n",
    )
    said: list[str] = []
    with (slurm / "shown").open("wb") as target:
        assert follow_job("7", target, said.append) == 3
    assert (slurm / "shown").read_bytes() == b"first\nsec\xff"
    assert said == [
        "job 7: pending (Resources)",
        "job 7: running",
        "job 7: preempted, exit code 143",
        "job 7: pending (BeginTime), restart 1",
        "job 7: running, restart 1",
        "job 7: failed, exit code 3, restart 1",
    ]


def test_slurm_that_does_not_answer(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.launch.slurm.job_queue.SILENCE_SECONDS", 0.05)
    play(slurm, "scontrol", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    with pytest.raises(HvdtrainError, match=r"no longer reports on job 7.*: slurm_load_jobs"):
        follow_job("7", None, print)  # type: ignore[arg-type]


def test_the_number_of_a_job(slurm: Path) -> None:
    play(slurm, "sbatch", "echo '12;cluster2'")
    assert submit_job(Path("x.sbatch")) == "12"


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["submit", *args], prog_name="hvdtrain")


def test_submit_with_a_strategy(slurm: Path) -> None:
    asked = ["--strategy", "parameter-server", "--workers", "3", "--ps", "2"]
    assert (
        call("--dry-run", *asked, "train.py").stdout.count(f"run {' '.join(asked)} train.py") == 1
    )
    for wrong, message in (
        (["--strategy", "parameter-servers"], "Did you mean 'parameter-server'?"),
        (["--workers", "3"], "--workers is for --strategy parameter-server"),
        ([*asked[:4], "--ps", "0"], "--ps 0: must be a number from 1 to 1000000"),
        (["--container=--privileged"], "'--privileged' is not an image"),
        (
            [*asked[:2], "--container", "x.sif"],
            "--container has no effect with --strategy parameter-server: leave it out",
        ),
    ):
        result = call("--dry-run", *wrong, "train.py")
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_submit_writes_what_dry_run_shows(slurm: Path) -> None:
    play(slurm, "sbatch", 'cp "${@: -1}" given; echo 12')
    args = ["--nodes", "2", "--requeue", "--time", "1:00:00", "train.py", "--epochs", "a b"]
    dry = call("--dry-run", *args)
    assert dry.exit_code == 0
    script, _, command = dry.stdout.rpartition("\n# ")
    assert command.startswith("sbatch --parsable .hvdtrain/jobs/train-")
    assert not (slurm / ".hvdtrain").exists()
    done = call(*args)
    assert (done.exit_code, done.stdout) == (0, "12\n")
    assert done.stderr.endswith("\noutput: .hvdtrain/jobs/train-12.out\n")
    assert (slurm / "given").read_text() == script
    assert [stat.S_IMODE(one.stat().st_mode) for one in slurm.glob(".hvdtrain/jobs/*.sbatch")] == [
        0o700
    ]
    assert "hvdtrain run train.py --epochs 'a b' &\n" in script
    assert (slurm / ".hvdtrain/jobs").is_dir()


def test_a_script_whose_name_is_not_in_utf_8(slurm: Path) -> None:
    play(slurm, "sbatch", 'cp "${@: -1}" given; echo 12')
    (slurm / os.fsdecode(b"caf\xe9.py")).touch()
    dry, done = (call(*words, os.fsdecode(b"caf\xe9.py")) for words in (["--dry-run"], []))
    assert (done.exit_code, done.stdout) == (0, "12\n")
    assert (slurm / "given").read_bytes() == dry.stdout_bytes.rpartition(b"\n# ")[0]
    assert (slurm / "given").read_bytes().endswith(b" run 'caf\xe9.py'\n")


def test_a_script_whose_name_begins_as_an_option(slurm: Path) -> None:
    (slurm / "-x.py").touch()
    done = call("--dry-run", "--env", "DATA=/d", "--", "-x.py", "--epochs", "3")
    assert " run --env DATA=/d -- -x.py --epochs 3\n" in done.stdout


def test_a_secret_stays_out_of_the_script(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "old")
    play(slurm, "sbatch", 'cp "${@: -1}" given; echo "$API_KEY" >key; echo 12')
    assert call("--env", "API_KEY=s3cret", "--env", "DATA=/d", "train.py").exit_code == 0
    assert "run --env API_KEY --env DATA=/d train.py" in (slurm / "given").read_text()
    assert "s3cret" not in (slurm / "given").read_text()
    assert (slurm / "key").read_text() == "s3cret\n"


def test_a_secret_argument_reaches_the_script_by_the_jobs_environment(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # A secret's value is put there.
    play(slurm, "hvdtrain", f'printf "%s\\n" "$@" >{slurm}/got')
    monkeypatch.setattr("hvdtrain.cli.submit._hvdtrain", lambda: (str(slurm / "hvdtrain"),))
    play(slurm, "sbatch", 'cp "${@: -1}" given; bash given; echo 12')
    secrets = ["--password", "it's $HOME", "--db=x://me:hunter2@h/", "-x"]
    shown = call("--dry-run", "train.py", *secrets)
    assert "it's" not in shown.output and "hunter2" not in shown.output
    assert shown.stderr == (
        "before you submit this, set HVDTRAIN_SECRET_1, HVDTRAIN_SECRET_2: secret values are "
        "left out of it\n"
    )
    for extra in ([], ["--requeue"]):
        assert call(*extra, "train.py", *secrets).exit_code == 0
        script = (slurm / "given").read_text()
        assert "it's" not in script and "hunter2" not in script
        assert (slurm / "got").read_text().splitlines() == ["run", "train.py", *secrets]
    bare = subprocess.run(["bash", slurm / "given"], env={}, capture_output=True, text=True)
    assert bare.returncode != 0
    assert "HVDTRAIN_SECRET_1: is not set: submit with hvdtrain submit" in bare.stderr


@pytest.mark.parametrize(
    ("args", "exit_code", "said"),
    [
        (["none.py"], 2, "no such script: none.py"),
        (
            ["--config", "none.yaml", "train.py"],
            2,
            "cannot read the configuration none.yaml: No such file",
        ),
        (["--time", "soon", "train.py"], 2, "--time 'soon': expected minutes"),
        (["--env", "NOT_HERE", "train.py"], 2, "--env NOT_HERE: not set in this environment"),
        (["-J", "exp/1", "train.py"], 2, "--job-name 'exp/1'"),
        (["--script-file", "/proc/x/y", "train.py"], 2, "cannot create the folder /proc/x"),
        (["train.py"], 1, "sbatch refused the job (.hvdtrain/jobs/train-"),
    ],
)
def test_errors_of_submit(slurm: Path, args: list[str], exit_code: int, said: str) -> None:
    play(slurm, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    result = call(*args)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert said in result.stderr
    assert result.stderr.startswith("Error: ") and "Traceback" not in result.stderr


def test_a_batch_script_takes_the_place_of_a_file_only(slurm: Path, tmp_path: Path) -> None:
    """Not of a device such as /dev/null, nor of the link /dev/stdout."""
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("old")
    link.symlink_to(file)
    os.mkfifo(pipe)
    for path in (link, pipe):
        result = call("--script-file", str(path), "train.py")
        assert (result.exit_code, result.stderr) == (
            2,
            f"Error: cannot write the batch script {path}: File exists\n",
        )
    assert link.is_symlink() and pipe.is_fifo() and file.read_text() == "old"


def test_no_slurm_here(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    result = call("train.py")
    assert result.exit_code == 2
    assert "sbatch was not found: submit the job from a login node" in (result.stderr)


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """Python ignores SIGINT if it was started in the background of a script, as CI may be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_while_waiting(slurm: Path) -> None:
    play(slurm, "sbatch", "echo 12")
    play(slurm, "scontrol", "kill -INT $PPID; sleep 1")
    result = call("--wait", "train.py")
    assert result.exit_code == 130
    assert "job 12 continues; to cancel it: scancel 12" in result.stderr
    assert result.stdout == "12\n"
