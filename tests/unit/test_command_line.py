"""The shape of the command line: commands and options, version, completion, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fake_programs import path_with

from hvdtrain import __version__
from hvdtrain import environment as names
from hvdtrain.cli.command_table import COMMANDS, EXIT_CODES, main
from hvdtrain.cli.version import version_text
from hvdtrain.doctor import software
from hvdtrain.environment import EXIT_INTERRUPTED, EXIT_USAGE

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "commands.txt"
# Their options have tests of their own.
FROZEN_ELSEWHERE = {"run", "submit", "docker"}


def shape(command: click.Command, name: str) -> Iterator[str]:
    """A line for each command with its arguments and options."""
    words = [
        "/".join(sorted([*parameter.opts, *parameter.secondary_opts]))
        if isinstance(parameter, click.Option)
        else (parameter.name or "").upper()
        for parameter in command.params
    ]
    yield " ".join([name, *([] if name in FROZEN_ELSEWHERE else sorted(words))])
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from shape(found, f"{name} {below}".removeprefix("hvdtrain "))


def test_commands_and_options_are_these() -> None:
    """Each is a promise. If a difference is on purpose, renew the list:
    HVDTRAIN_RENEW_GOLDEN=1 pytest tests/unit/test_command_line.py -k options_are_these"""
    listed = "\n".join(shape(main, "hvdtrain")) + "\n"
    if "HVDTRAIN_RENEW_GOLDEN" in os.environ:
        GOLDEN.write_text(listed)
    assert listed == GOLDEN.read_text(), test_commands_and_options_are_these.__doc__


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-np", "2", f"{LONG}.py"],
        ["run", "-np", "2", "--controller", "gloo", "--timeline-filename", LONG, __file__],
        ["run", "-np", "2", "--host-discovery-script", LONG, __file__],
        ["submit", f"{LONG}.py"],
        ["submit", "-J", LONG, __file__],
        ["docker", "--dry-run", "--engine", "docker", f"{LONG}.py"],
        ["docker", "--dry-run", "--engine", "docker", "--volume", f"./{LONG}", __file__],
        ["logs", LONG],
        ["new", "mnist", LONG],
    ],
    ids=lambda words: " ".join(word for word in words if LONG not in word and word != __file__),
)
def test_a_path_that_cannot_be_is_one_message(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".hvdtrain/jobs").mkdir(parents=True)
    result = CliRunner().invoke(main, words, prog_name="hvdtrain")
    assert result.exit_code == EXIT_USAGE, result.output
    assert re.fullmatch(f"(.*\n)?Error: .*{LONG}.*: File name too long\n", result.stderr)


def test_every_command_says_what_it_does_and_every_option_too() -> None:
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or parameter.help, (name, parameter.name)  # type: ignore[attr-defined]


def hvdtrain(*args: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hvdtrain.cli", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **changes},
        capture_output=True,
        text=True,
        timeout=60,
    )


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


# Ctrl-C


@pytest.mark.parametrize(
    ("program", "imports"),
    [
        ("hvdtrain.cli", "click"),
        ("hvdtrain.cli", "shlex"),  # Of the command `run`.
        ("hvdtrain.start.run_horovod", "argparse"),
        ("hvdtrain.start.run_srun", "argparse"),
        ("hvdtrain.start.run_parameter_servers", "argparse"),
    ],
)
def test_ctrl_c_in_an_import_is_not_a_word(program: str, imports: str, tmp_path: Path) -> None:
    (tmp_path / f"{imports}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    command = ["run"] if program == "hvdtrain.cli" else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", program, *command, "-np", "1", "true"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "")


# Version


def test_version_is_what_a_bug_report_needs() -> None:
    start = time.monotonic()
    done = hvdtrain("--version")
    assert time.monotonic() - start < 5, "metadata, and two short programs"
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert first == f"hvdtrain {__version__}"
    values = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)
    assert list(values) == [
        "Python", "platform", "cores", "TensorFlow", "Keras", "Horovod", "MPI", "GPUs",
    ]  # fmt: skip
    assert sys.version.split()[0] in values["Python"]
    assert os.uname().release in values["platform"]
    assert values["Keras"] == software.version_of("keras")
    assert imported(done).isdisjoint({"tensorflow", "keras", "horovod", "numpy"})


def test_version_with_mpi_and_gpus(tmp_path: Path) -> None:
    programs = {
        "mpirun": 'echo "mpirun (Open MPI) 4.1.6"',
        "nvidia-smi": 'echo "NVIDIA H100, 570.1"; echo "NVIDIA H100, 570.1"',
    }
    text = version_text(path_with(tmp_path, programs))
    assert f"Open MPI 4.1.6 ({tmp_path}/mpirun)" in text
    assert "2 x NVIDIA H100, driver 570.1" in text


def test_version_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[version_text.__module__]
    monkeypatch.setattr(module, "version_of", lambda name: None)
    monkeypatch.setattr(module, "find_mpirun", lambda path: None)
    text = version_text(path_with(tmp_path, {}))
    assert text.count("not installed") == 3
    assert "no mpirun in PATH" in text


# Completion


def complete(words: str, number: int) -> tuple[list[str], set[str]]:
    """What Bash would be offered for the word, and what was imported for it."""
    done = hvdtrain(_HVDTRAIN_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(number))
    return [line.partition(",")[2] for line in done.stdout.splitlines()], imported(done)


def test_commands_are_completed_from_the_table() -> None:
    offered, modules = complete("hvdtrain ", 1)
    assert offered == sorted(COMMANDS)
    assert not {module for module in modules if module.startswith("hvdtrain.cli.")} - {
        "hvdtrain.cli.__main__",
        "hvdtrain.cli.command_table",
    }
    assert complete("hvdtrain ins", 1)[0] == ["install-horovod"]
    assert complete("hvdtrain --v", 1)[0] == ["--version"]


def test_options_and_values_are_completed() -> None:
    offered, modules = complete("hvdtrain doctor --ssh", 2)
    assert offered == ["--ssh-port", "--ssh-identity-file"]
    assert modules.isdisjoint({"tensorflow", "keras", "horovod", "numpy"})
    assert complete("hvdtrain run --controller ", 3)[0] == ["auto", "mpi", "gloo"]
    assert complete("hvdtrain new hor", 2)[0] == ["horovod-style"]
    assert complete("hvdtrain submit --controller ", 3)[0] == ["auto", "mpi", "gloo"]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("hvdtrain run tr", 2),
        ("hvdtrain run --hostfile ho", 3),
        ("hvdtrain run train.py da", 3),
        ("hvdtrain submit tr", 2),
        ("hvdtrain docker tr", 2),
    ],
)
def test_files_are_left_to_the_shell(words: str, number: int) -> None:
    done = hvdtrain(_HVDTRAIN_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(number))
    assert done.stdout == f"file,{words.rpartition(' ')[2]}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell], prog_name="hvdtrain")
    assert result.exit_code == 0
    assert f"_HVDTRAIN_COMPLETE={shell}_complete" in result.stdout
    by_default = CliRunner(env={"SHELL": f"/usr/bin/{shell}"})
    assert by_default.invoke(main, ["completion"]).stdout == result.stdout


def test_bash_completes_with_the_printed_script(tmp_path: Path) -> None:
    """As a user meets it: source the script, ask Bash's own function."""
    folder = tmp_path / "bin"
    path_with(folder, {"hvdtrain": f'exec {sys.executable} -m hvdtrain.cli "$@"'})
    script = CliRunner().invoke(main, ["completion", "bash"], prog_name="hvdtrain").stdout
    (tmp_path / "completion").write_text(script)
    asked = (
        f"source {tmp_path}/completion; COMP_WORDS=(hvdtrain ins); COMP_CWORD=1; "
        '_hvdtrain_completion hvdtrain; echo "${COMPREPLY[@]}"'
    )
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "install-horovod\n", done.stderr


def test_completion_for_an_unknown_shell() -> None:
    result = CliRunner(env={"SHELL": "/bin/tcsh"}).invoke(main, ["completion"])
    assert result.exit_code == 2
    assert "Specify a shell: bash, zsh, fish." in result.stderr


# Exit codes


def test_help_documents_the_exit_codes() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"]).stdout.split())
    assert EXIT_CODES in shown
    for words in (
        f"{names.EXIT_FAILURE} run-time error",
        f"{names.EXIT_USAGE} usage error",
        f"{names.EXIT_PREEMPTED} saved and stopped on request",
        f"{names.EXIT_HANG} the run hung",
        f"{names.EXIT_INTERRUPTED} ended by Ctrl-C",
        f"{names.EXIT_TERMINATED} ended by SIGTERM",
        f"{names.EXIT_SIGNAL_BASE} + the signal's number",
    ):
        assert words in EXIT_CODES


def test_ctrl_c_is_130_in_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.cli import doctor

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run_checks", interrupted)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == names.EXIT_INTERRUPTED
    assert result.stderr == "\nInterrupted.\n"


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--grace-seconds"],
        ["run", "--hang-timeout"],
        ["run", "--cycle-time-ms"],
        ["run", "--autotune", "--autotune-gaussian-process-noise"],
        ["stop", "--timeout"],
    ],
)
def test_a_time_without_end_is_refused(words: list[str], number: str, tmp_path: Path) -> None:
    """A limit that no time is longer than would never end anything."""
    script = tmp_path / "train.py"
    script.touch()
    more = ["-np", "1", "--dry-run", str(script)] if words[0] == "run" else ["job"]
    result = CliRunner().invoke(main, [*words, number, *more])
    assert (result.exit_code, "number" in result.stderr) == (2, True), result.stderr
    assert number in result.stderr
