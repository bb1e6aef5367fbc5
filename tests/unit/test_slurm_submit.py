"""`hvdtrain submit`: what it writes, what it refuses, and what it says."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from slurm_stand_in import play

from hvdtrain.cli.command_table import main


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
        ([*asked[:4], "--ps", "0"], "--ps 0: must be at least 1"),
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
    assert not list(slurm.glob(".hvdtrain/jobs/*.sbatch"))


def test_a_controller_that_cannot_be_reached(slurm: Path) -> None:
    words = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    play(slurm, "sbatch", f"echo 'sbatch: error: {words}' >&2; exit 1")
    result = call("train.py")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing was submitted: Slurm's controller could not be reached." in result.stderr
    assert words in result.stderr and "refused" not in result.stderr
    assert not list(slurm.glob(".hvdtrain/jobs/*.sbatch"))
    assert call("--script-file", "own.sbatch", "train.py").exit_code == 1
    assert (slurm / "own.sbatch").exists(), "the user's own file stays"


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
