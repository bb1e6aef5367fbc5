"""`hvdtrain` and `hvdtrain run`: what is refused, how it is said, and that help is cheap."""

import importlib
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.cli.command_table import COMMANDS, main
from hvdtrain.launch import planning
from hvdtrain.launch.secrets import looks_secret

REPOSITORY = Path(__file__).parents[2]
STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="hvdtrain")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hostfile").write_text("a slots=2\nb slots\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").touch()
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    (tmp_path / "notes.ipynb").write_text("{}")
    return tmp_path


def test_an_argument_that_is_not_utf_8_is_printed_as_it_is(folder: Path) -> None:
    result = call("run", "-np", "2", "--dry-run", "train.py", os.fsdecode(b"\xff"))
    assert result.stdout_bytes.endswith(b" train.py '\xff'\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-np", "2", "nothing.py"], "no such script: nothing.py"),
        (["-np", "2", "train"], ". Did you mean train.py?"),
        (["-np", "2", "trian.py"], ". Did you mean train.py?"),
        (["-np", "2", "package/modul.py"], ". Did you mean package/module.py?"),
        (["--nproc", "2", "train.py"], "'--nproc': -np N sets the number of workers."),
        (["-np", "2", "notes.ipynb"], "is a notebook: convert it to a script (jupyter nbconvert"),
        (["-np", "2", "package.module"], ". Did you mean -m package.module?"),
        (["-np", "2", "job.sh"], "job.sh is neither a Python script nor executable: chmod +x"),
        (["-np", "0", "train.py"], "-np 0: must be at least 1"),
        (["-np", "1000000000", "train.py"], "must be a number from 1 to 1000000"),
        (["-np", "9" * 400, "train.py"], "must be a finite number, at most 9223372036854775807"),
        (["-np", "two", "train.py"], "for '-np' / '--num-proc': 'two' is not a valid integer"),
        (
            ["--host-discovery-script", "x", "train.py"],
            "--host-discovery-script needs the number of workers to start with: add -np N",
        ),
        (["-np", "2"], "Missing argument 'SCRIPT'"),
        (
            ["-np", "2", "--dryrun", "train.py"],
            "No such option '--dryrun'. Did you mean '--dry-run'?",
        ),
        (
            ["-np", "2", "--env", "A B", "train.py"],
            "Invalid value for '--env': 'A B' is not a valid name",
        ),
        (["-np", "2", "--env", "NOT_HERE", "train.py"], "--env NOT_HERE: not set in this environ"),
        (["-np", "2", "--controller", "gluu", "train.py"], "'gluu' is not one of"),
        (["-np", "9", "-H", "a:2,b:2", "train.py"], "-np 9 is more than the 4 slots of a:2, b:2"),
        (["-H", "a", "train.py"], "cannot read 'a' in the host list"),
        (["-H", "a:1", "--hostfile", "hostfile", "train.py"], "use only one of them"),
        (["--hostfile", "hostfile", "train.py"], "hostfile, line 2: cannot read 'b slots'"),
        (
            ["-np", "2", f"--env={STALL}=600", "--stall-shutdown-seconds=90", "train.py"],
            f"--env {STALL}=600 and --stall-shutdown-seconds 90 set the same thing to different "
            "values",
        ),
        (["-np", "2", f"--env={STALL}=soon", "train.py"], f"--env {STALL}: 'soon' is not a valid"),
        (
            ["-np", "2", "--hostfile", "~no-one/h", "train.py"],
            "cannot read the hostfile ~no-one/h: No",
        ),
        (
            ["-np", "2", "--log-dir", "train.py", "train.py"],
            "cannot create the log folder train.py",
        ),
    ],
)
def test_user_errors_are_one_message(folder: Path, args: list[str], message: str) -> None:
    result = call("run", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("options", [["-np", "2"], ["--strategy", "central-storage", "-np", "2"]])
def test_a_launch_is_not_started_by_each_process_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    monkeypatch.setenv(name, "4")
    result = call("run", "--dry-run", *options, "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"one of 4 processes of another launch ({name}=4): start it once" in result.stderr
    monkeypatch.setenv(name, "1")
    assert call("run", "--dry-run", *options, "train.py").exit_code == 0


def test_a_variable_that_nothing_reads_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ("HVDTRAIN_CACHE", "HVDTRAIN_VENV", "HVDTRAIN_RANK_CORES", "HVDTRAIN_SSH_KEYS")
    for name in (*known, "HVDTRAIN_CONTROLER", "HVDTRAIN_NPP", "HVDTRAIN_ZZZ", "HVDTRAIN_MINE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("HVDTRAIN_TCP", "1")
    result = call("run", "--dry-run", "-np", "2", "--env", "HVDTRAIN_MINE", "train.py")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "HVDTRAIN_CONTROLER is set, but nothing reads it. Did you mean HVDTRAIN_CONTROLLER?",
        "HVDTRAIN_NPP is set, but nothing reads it. Did you mean HVDTRAIN_NP?",
        "HVDTRAIN_ZZZ is set, but nothing reads it.",
    ]


def test_without_horovod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("run", "-np", "2", "train.py")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Horovod is not installed")
    assert result.stderr.endswith("run: hvdtrain install-horovod\n")


def test_resume_reaches_the_ranks_as_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = call("run", "--dry-run", "-np", "2", "--resume", "must", "train.py").stdout
    assert said.startswith("env ") and " HVDTRAIN_RESUME=must " in said
    monkeypatch.setenv("HVDTRAIN_RESUME", "never")
    assert " HVDTRAIN_RESUME=never " in call("run", "--dry-run", "-np", "2", "train.py").stdout
    batch = call("submit", "--dry-run", "--nodes", "2", "--resume", "must", "train.py").stdout
    assert " --resume must " in batch


def test_profile_reaches_the_ranks_as_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = call("run", "--dry-run", "-np", "2", "--profile", "100", "train.py").stdout
    assert " HVDTRAIN_PROFILE=100-104 " in said
    assert (
        "profile: 100-104  #" in call("run", "--show-config", "--profile", "100", "train.py").stdout
    )
    monkeypatch.setenv("HVDTRAIN_PROFILE", "7-9")
    assert " HVDTRAIN_PROFILE=7-9 " in call("run", "--dry-run", "-np", "2", "train.py").stdout
    batch = call("submit", "--dry-run", "--nodes", "2", "--profile", "7-9", "train.py").stdout
    assert " --profile 7-9 " in batch
    for command in (["run", "-np", "2"], ["submit", "--nodes", "2"]):
        result = call(*command, "--profile", "9-7", "train.py")
        assert result.exit_code == 2
        assert "'9-7' is not a range of steps" in result.stderr


def test_dry_run_prints_and_starts_nothing(folder: Path) -> None:
    result = call("run", "--dry-run", "-H", "a:2,b:1", "train.py", "--dry-run", "a b", "-np", "7")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert " -np 3 " in result.stdout
    assert " -H a:2,b:1 " in result.stdout
    assert result.stdout.endswith("-m hvdtrain.worker train.py --dry-run 'a b' -np 7\n")
    assert not (folder / ".hvdtrain").exists()


def test_what_to_do_before_a_printed_command_is_pasted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # A secret's value is put there.
    words = ("run", "--dry-run", "-np", "1", "--env", "API_KEY=hush", "--env", "A=b", "train.py")
    result = call(*words, "--token", "hush")
    assert "hush" not in result.output
    assert result.stderr == (
        "before you paste this, set API_KEY: the command does not contain secret values\n"
        "before you paste this, replace *** with the secret values\n"
    )
    assert call(*words).stderr == ""  # It is set by now.


@pytest.mark.parametrize(
    ("exported", "options", "line"),
    [
        ("gloo", [], "horovodrun -np 2 --gloo "),
        ("GLOO", [], "horovodrun -np 2 --gloo "),
        ("mpi", ["--gloo"], "env -u HOROVOD_CONTROLLER horovodrun -np 2 --gloo "),
        (
            "gloo",
            ["--controller", "mpi"],
            "env -u HOROVOD_CONTROLLER OMPI_MCA_mpi_yield_when_idle=1 horovodrun -np 2 --mpi ",
        ),
    ],
)
def test_an_exported_controller_is_a_wish(
    folder: Path, exported: str, options: list[str], line: str
) -> None:
    """In the ranks' environment it would go before what the launcher tells them."""
    words = ["run", "--dry-run", "-np", "2", *options, "train.py"]
    result = CliRunner().invoke(main, words, env={"HOROVOD_CONTROLLER": exported})
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(line)


def test_the_environment_may_set_the_stall_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
    printed = call("run", "--dry-run", "-np", "2", "train.py").stdout
    assert "--stall-check-shutdown-time-seconds 600 " in printed


@pytest.mark.parametrize(
    ("args", "exported", "seconds"),
    [
        ([f"--env={STALL}=600"], {}, "600"),
        ([f"--env={STALL}=600", "--stall-shutdown-seconds", "600"], {}, "600"),
        # What was said nearer goes before: the command line, then the environment, then the file.
        ([f"--env={STALL}=600"], {STALL: "700"}, "600"),
        ([f"--env={STALL}=600"], {"HVDTRAIN_STALL_SHUTDOWN_SECONDS": "700"}, "600"),
        (["--config", "run.yaml"], {}, "800"),
        (["--config", "run.yaml", "--stall-shutdown-seconds", "900"], {}, "900"),
    ],
)
def test_a_variable_for_the_workers_is_not_overruled_by_a_default(
    folder: Path, args: list[str], exported: dict[str, str], seconds: str
) -> None:
    (folder / "run.yaml").write_text(f"env: {{{STALL}: 800}}\n")
    words = ["run", "--dry-run", "-np", "2", *args, "train.py"]
    result = CliRunner().invoke(main, words, env=exported)
    assert f"--stall-check-shutdown-time-seconds {seconds} " in result.stdout
    words[1] = "--show-config"
    shown = CliRunner().invoke(main, words, env=exported).stdout
    source = "run.yaml" if seconds == "800" else "command line"
    assert f"\nstall-shutdown-seconds: {seconds}  # {source}\n" in shown


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["--stall-warning-seconds", "60"], (60, 90)),
        (["--stall-shutdown-seconds", "9"], (4, 9)),
        (["--stall-warning-seconds", "30", "--stall-shutdown-seconds", "30"], (15, 30)),
        (["--stall-warning-seconds", "1", "--stall-shutdown-seconds", "1"], (1, 2)),
        ([f"--env={STALL}=20"], (10, 20)),
        # What is also the default.
        (["--stall-warning-seconds", "60", "--stall-shutdown-seconds", "50"], (25, 50)),
    ],
)
def test_stall_times_that_exclude_each_other_are_adjusted(
    folder: Path, given: list[str], taken: tuple[int, int]
) -> None:
    result = call("run", "--dry-run", "-np", "2", *given, "train.py")
    assert f"--stall-check-warning-time-seconds {taken[0]} " in result.stdout
    assert f"--stall-check-shutdown-time-seconds {taken[1]} " in result.stdout
    assert result.stderr.endswith(f": using {taken[1]} and {taken[0]}\n")
    assert result.stderr.count("\n") == 1
    never = call("run", "--dry-run", "-np", "2", "--no-stall-check", *given[:0], "train.py")
    assert never.stderr == ""


def test_variables_for_the_workers_in_a_variable_are_words_of_a_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDTRAIN_ENV", "A=1 'B=x y' C=\"it's\"")
    printed = call("run", "--dry-run", "-np", "1", "train.py").stdout
    assert shlex.split(printed)[1:].index("C=it's") == shlex.split(printed)[1:].index("B=x y") + 1
    monkeypatch.setenv("HVDTRAIN_ENV", "'A=1")
    wrong = call("run", "--dry-run", "-np", "1", "train.py")
    assert (wrong.exit_code, wrong.stderr) == (2, "Error: HVDTRAIN_ENV: no closing quotation\n")


@pytest.mark.parametrize(
    ("gpus", "cores", "number", "reason"),
    [
        (4, 64, 4, "one worker per GPU on this machine (4)"),
        (0, 2, 2, "no GPU found; one worker per core (2)"),
        (0, 64, 8, "no GPU found; the 64 cores are shared by 8 workers"),
    ],
)
def test_without_numbers_it_takes_what_is_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, number: int, reason: str
) -> None:
    monkeypatch.setattr(planning, "visible_gpus", lambda _: ("0",) * gpus)
    monkeypatch.setattr(planning, "usable_cores", lambda: cores)
    result = call("run", "--dry-run", "train.py")
    assert f" -np {number} " in result.stdout
    assert result.stderr == f"-np {number}: {reason}\n"
    result = call("run", "--dry-run", "train.py", "-np", "4")
    assert "the script is passed -np: options of hvdtrain come before the script" in result.stderr


ANY = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.one_of(ANY, st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)), value=ANY)
def test_any_variable_is_passed_as_it_is_or_refused(folder: Path, name: str, value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))  # A secret's value is put there.
        result = call("run", "--dry-run", "-np", "1", f"--env={name}={value}", "train.py")
    name, _, value = f"{name}={value}".partition("=")
    if result.exit_code == 2:
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        known = (
            "is set by the launcher",
            f"--env {name}: ",
        )  # What has an option is checked as that.
        assert (
            any(words in result.stderr for words in known)
            or not re.fullmatch("[A-Z_][A-Z0-9_]*", name)
            or "\0" in value
        )
        return
    assert result.exit_code == 0
    words = shlex.split(result.stdout)
    if looks_secret(name, value):
        assert f"{name}={value}" not in words
    else:
        assert f"{name}={value}" in words[: words.index("-np")]


@pytest.mark.parametrize("name", ["HVDTRAIN_NP", "HVDTRAIN_NUM_PROC"])
def test_each_long_name_is_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "3")
    result = call("run", "--dry-run", "train.py")
    assert " -np 3 " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--nnodes=2"], "pass the hosts with -H NAME:SLOTS,..."),
        (["--num_machines", "2"], "pass the hosts with -H NAME:SLOTS,..."),
        (["--master-addr", "a"], "leave it out: start hvdtrain run once"),
        (["--rdzv_endpoint=a:1"], "leave it out: start hvdtrain run once"),
        (["-x", "A=b"], "--env NAME=VALUE"),
    ],
)
def test_words_of_other_launchers(
    folder: Path, command: str, words: list[str], advice: str
) -> None:
    result = call(command, *words, "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"No such option '{words[0].partition('=')[0]}': {advice}" in result.stderr


def test_a_wrong_variable_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_START_TIMEOUT", "HVDTRAIN_NUM_PROC"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "soon")
            result = call("run", "--dry-run", "train.py")
        assert f"Error: Invalid value for {name}: 'soon' is not a valid" in result.stderr
    assert (
        "'--gpus': --gpus-per-node N requests GPUs" in call("submit", "--gpus", "2", "x.py").stderr
    )


@pytest.mark.parametrize("names", [["--version", "-v"], ["--check-build", "-cb"]])
def test_horovodruns_questions(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    for module in ("version", "doctor"):
        importlib.import_module(f"hvdtrain.cli.{module}")
    monkeypatch.setattr(sys.modules["hvdtrain.cli.version"], "version_text", lambda _: "hvdtrain")
    doctor = sys.modules["hvdtrain.cli.doctor"].doctor  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "callback", lambda **_: click.echo("examined"))
    for name in names:
        result = call("run", name)
        assert result.exit_code == 0
        assert result.stdout == ("hvdtrain\n" if "version" in names[0] else "examined\n")


def test_a_wrong_command_gets_a_hint() -> None:
    result = call("rum")
    assert result.exit_code == 2
    assert "No such command 'rum'. Did you mean 'run'?" in result.stderr
    assert "Did you mean 'hvdtrain run train.py'?" in call("train.py", "-np", "2").stderr


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for name, description in COMMANDS.items():
        assert name in result.stdout
        assert description in result.stdout


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "hvdtrain")


def python(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["run", "--dry-run", "-np", "1"]])
def test_composing_loads_no_engine(args: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    names = [str(script)] if "--dry-run" in args else []
    report = python("-X", "importtime", "-m", "hvdtrain.cli", *args, *names).stderr
    loaded = {line.rpartition("|")[2].strip() for line in report.splitlines()}
    assert "click" in loaded
    assert loaded.isdisjoint({"tensorflow", "keras", "horovod", "numpy"})
    if args == ["--help"]:
        assert "hvdtrain.launch" not in loaded


def test_help_is_as_fast_as_click() -> None:
    def seconds(*args: str) -> float:
        started = time.perf_counter()
        python(*args)
        return time.perf_counter() - started

    pairs = [
        (seconds("-c", "import click"), seconds("-m", "hvdtrain.cli", "--help")) for _ in range(9)
    ]
    assert statistics.median(helped / bare for bare, helped in pairs) <= 2.5
