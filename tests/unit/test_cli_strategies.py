"""`hvdtrain run --strategy` and `hvdtrain strategies`: what is composed, refused and told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_programs import path_with

from hvdtrain.cli.command_table import main
from hvdtrain.cli.strategies import Machine, here, table
from hvdtrain.strategy_names import STRATEGIES

REPOSITORY = Path(__file__).parents[2]
SERVERS = ("--strategy", "parameter-server", "--workers", "2")
STORAGE = ("--strategy", "central-storage")
NO_GPUS = Machine(8, 0, "", ("gloo", "mpi"), "", True)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="hvdtrain")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM", "HVDTRAIN_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=1\n")
    return tmp_path


def dry_run(*args: str) -> list[str]:
    result = call("run", "--dry-run", *args, "train.py", "-np", "7")
    assert (result.exit_code, result.stderr) == (0, "")
    words = shlex.split(result.stdout)
    at = words.index(sys.executable)
    assert words[-7:] == [sys.executable, "-P", "-m", "hvdtrain.worker", "train.py", "-np", "7"]
    return words[:at] if "--" not in words else words[at + 3 : words.index("--")]


@pytest.mark.parametrize(
    ("args", "composed"),
    [
        (["--strategy", "tpu"], "env HVDTRAIN_STRATEGY=tpu"),
        (["--strategy", "TPUStrategy", "-np", "8"], "env HVDTRAIN_STRATEGY=tpu HVDTRAIN_REPLICAS=8"),
        ([*STORAGE, "--grace-seconds", "5"], "env HVDTRAIN_STRATEGY=central-storage"),
        ([*SERVERS], "hvdtrain.start.run_parameter_servers --workers 2 --ps 1"),
        (
            [*SERVERS[:2], "--ps", "2", "-H", "a:2,b:2", "-p", "33", "--start-timeout", "9"],
            "hvdtrain.start.run_parameter_servers --workers 2 --ps 2 --hosts a:2,b:2 --ssh-port 33 "
            "--start-timeout 9",
        ),
        (
            [*SERVERS, "--hostfile", "hostfile"],
            "hvdtrain.start.run_parameter_servers --workers 2 --ps 1 --hosts a:2,b:1 --start-timeout 32",
        ),
    ],
)  # fmt: skip
def test_dry_run(args: list[str], composed: str) -> None:
    assert shlex.join(dry_run(*args)) == composed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--strategy", "central"], "no such strategy: 'central'. Did you mean 'central-storage'?"),
        ([*STORAGE, "--controller", "gloo"], "--controller has no effect with --strategy central-"),
        ([*STORAGE, "-H", "a:2"], "--hosts has no effect with --strategy central-storage"),
        ([*STORAGE, "--min-np", "2"], "--min-np has no effect with --strategy central-storage"),
        ([*STORAGE, "--workers", "2"], "--workers has no effect with --strategy central-storage"),
        ([*STORAGE, "-np", "0"], "-np 0: must be at least 1"),
        ([*SERVERS, "-np", "2"], "-np has no effect with --strategy parameter-server: leave it out; use --w"),
        ([*SERVERS, "--max-np", "2"], "--max-np has no effect with --strategy parameter-server"),
        ([*SERVERS, "--ps", "0"], "--ps 0: must be at least 1"),
        ([*SERVERS, "-H", "a:1,b:1"], "3 workers and servers are more than the 2 slots of a:1, b:1"),
        ([*SERVERS, "-H", "a:1", "--hostfile", "hostfile"], "use only one of them"),
        ([*SERVERS, "-p", "99999"], "--ssh-port 99999: must be a number from 1 to 65535"),
        ([*SERVERS, "--start-timeout", "-5"], "--start-timeout -5: must be at least 1 second"),
        ([*SERVERS, "--env", "A=1", "--env", "A=2"], "--env A appears twice: keep only one"),
        ([*STORAGE, "--env", "A=1", "--env", "A=2"], "--env A appears twice: keep only one"),
        ([*SERVERS, "--env", "TF_CONFIG=x"], "TF_CONFIG is set by the launcher for each worker: leave"),
        ([*SERVERS, "--env", "HVDTRAIN_STRATEGY=tpu"], "HVDTRAIN_STRATEGY is set by the launcher"),
        ([*SERVERS, "-i", "nokey"], "--ssh-identity-file: no such file: nokey"),
        ([*SERVERS, "--launcher", "srun"], "--launcher srun works only inside a Slurm job"),
        (SERVERS[:2], "the number of workers is missing: add --workers N"),
        (["-np", "2", "--workers", "2"], "--workers is for --strategy parameter-server"),
        (["-np", "2", "--ps", "2"], "--ps is for --strategy parameter-server"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(args: list[str], message: str) -> None:
    result = call("run", "--dry-run", *args, "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("Error: ") == 1
    missing = call("run", "--dry-run", *SERVERS, "nothing.py")
    assert (missing.exit_code, "no such script" in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("strategy", "lacks"), [("tpu", "needs a TPU"), ("central-storage", "at least two GPUs")]
)
def test_a_machine_without_it_is_told_at_once(
    strategy: str, lacks: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path_with(folder / "bin", {})["PATH"])
    monkeypatch.setattr("hvdtrain.launch.launchers.one_process.tpu_here", lambda environ: "")
    result = call("run", "--strategy", strategy, "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: strategy {strategy} needs")
    assert lacks in result.stderr
    assert not (folder / ".hvdtrain").exists()


def test_what_horovod_replaces_is_explained_in_one_line() -> None:
    result = call("run", "--dry-run", "--strategy", "mirrored", "-np", "2", "train.py")
    plain = call("run", "--dry-run", "-np", "2", "train.py")
    assert result.stdout == plain.stdout != ""
    assert result.stderr.startswith("strategy mirrored: using horovod, which does what ")
    assert result.stderr.count("\n") == 1


def test_the_environment_and_files_name_a_strategy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file says for Horovod is no mistake with another strategy at the command line."""
    (folder / "run.yaml").write_text("np: 4\ncontroller: gloo\nautotune: true\n")
    (folder / "ps.yaml").write_text("strategy: parameter-server\nworkers: 2\ncontroller: gloo\n")
    assert dry_run("--config", "run.yaml", *SERVERS)[1:] == ["--workers", "2", "--ps", "1"]
    result = call("run", "--dry-run", "--config", "ps.yaml", "train.py")
    assert "--controller has no effect with --strategy parameter-server" in result.stderr
    monkeypatch.setenv("HVDTRAIN_STRATEGY", "parameter-server")
    monkeypatch.setenv("HVDTRAIN_WORKERS", "3")
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "40")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90")  # A site's, for all jobs.
    assert "--start-timeout" in dry_run()
    shown = call("run", "--show-config", *SERVERS, "train.py").stdout
    assert "\nstrategy: parameter-server  # command line\n" in shown


def test_in_a_slurm_job_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURMD_NODENAME": "n1",
    }.items():
        monkeypatch.setenv(name, value)
    assert dry_run(*SERVERS, "--ps", "2")[1:] == [
        *("--workers", "2", "--ps", "2", "--hosts", "n1:2,n2:2", "--start-timeout", "32", "--srun"),
    ]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "4")
    assert dry_run(*SERVERS)[1:] == ["--workers", "2", "--ps", "1"]


def test_horovods_ranks_do_not_get_another_strategy_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVDTRAIN_STRATEGY", "tpu")
    words = ["run", "--dry-run", "--strategy", "horovod", "-np", "1"]
    for more in ([], ["--env", "A=b"]):
        printed = shlex.split(call(*words, *more, "train.py").stdout)
        assert "HVDTRAIN_STRATEGY=horovod" in printed[: printed.index("horovodrun")]
        assert ("A=b" in printed, printed.count("env")) == (bool(more), 1)


# One process


def begin(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.cli", "run", *STORAGE, "-np", "2", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOROVOD_RANK": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_one_process_as_if_it_ran_alone(folder: Path) -> None:
    script = (
        "import os, sys\n"
        "print('[1]<stdout>:', *(os.environ.get('HVDTRAIN_' + name) for name in ('STRATEGY', 'REPLICAS')))\n"
        "launcher = open(f'/proc/{os.getppid()}/cmdline').read()\n"
        "print('hvdtrain.cli' in launcher, 'sesame' in launcher, os.environ['API_KEY'])\n"
        "print('HOROVOD_RANK' in os.environ, end='')\n"
        "raise ValueError('no data')\n"
    )
    run = begin(folder, script, "--log-dir", "logs", "--env", "API_KEY=sesame")
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert stdout == "[1]<stdout>: central-storage 2\nTrue False sesame\nFalse"
    assert stderr.lstrip().startswith("the script failed:\nTraceback ")
    assert stderr.endswith("\nValueError: no data\nlogs: logs\n")
    assert (folder / "logs/rank.0/stdout").read_text() == stdout


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise SystemExit(7)", 7, "the script ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "the script was killed by SIGKILL"),
    ],
)
def test_how_one_process_ends(folder: Path, script: str, code: int, said: str) -> None:
    run = begin(folder, script)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == code
    assert stderr.lstrip().startswith(said)


def test_ctrl_c_ends_one_process(folder: Path) -> None:
    run = begin(folder, "import time\nopen('started', 'w').close()\ntime.sleep(600)\n")
    while not (folder / "started").exists():
        time.sleep(0.02)
    asked = time.monotonic()
    os.kill(run.pid, signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert time.monotonic() - asked < 5
    assert (run.returncode, stderr) == (
        130,
        "\nSIGINT: stopping the run (repeat to stop at once)\n",
    )


# hvdtrain strategies


def test_the_table_fits_80_columns_and_says_all() -> None:
    text = table(NO_GPUS)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for one in STRATEGIES.values():
        assert f"{one.name} {one.purpose} needs: {one.needs} here: " in words
    assert "also called: mirrored, multi-worker-mirrored" in words


@pytest.mark.parametrize(
    ("name", "machine", "answer"),
    [
        ("horovod", NO_GPUS, (True, "over Gloo and MPI, on 8 cores")),
        ("horovod", Machine(1, 1, "", ("mpi",), "", True), (True, "over MPI, on 1 GPU")),
        ("horovod", Machine(1, 0, "", (), "not installed: do it", True), (False, "not installed: do it")),
        ("tpu", NO_GPUS, (False, "no TPU device file, and TPU_NAME is not set")),
        ("tpu", Machine(1, 0, "/dev/accel0", ("gloo",), "", True), (True, "/dev/accel0")),
        ("central-storage", NO_GPUS, (False, "no GPUs; use -np N for replicas on 8 cores")),
        ("central-storage", Machine(1, 1, "", ("gloo",), "", True), (False, "1 GPU; use -np N for replicas on 1 core")),
        ("central-storage", Machine(1, 2, "", ("gloo",), "", True), (True, "on 2 GPUs")),
        ("central-storage", Machine(1, 2, "", (), "none", True), (False, "none")),
        ("parameter-server", NO_GPUS, (True, "on 8 cores")),
        ("parameter-server", Machine(1, 0, "", (), "", False), (False, "TensorFlow is not installed")),
    ],
)  # fmt: skip
def test_whether_this_machine_has_it(name: str, machine: Machine, answer: tuple[bool, str]) -> None:
    assert here(name, machine) == answer


def test_the_command_loads_no_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hvdtrain.cli", "strategies", "--json"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == list(STRATEGIES)
    assert all(isinstance(row["here"], bool) and row["found"] for row in rows)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert loaded.isdisjoint({"tensorflow", "keras", "horovod", "numpy"})
    assert "here:" in call("strategies").stdout
