"""`hvdtrain run`, `submit` and `docker` share one table of options: what one takes, the others pass on."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hvdtrain.cli.command_table import main
from hvdtrain.cli.forwarded_options import RunPart
from hvdtrain.cli.launch_options import GroupedOption
from hvdtrain.cli.run import run

GOLDEN = Path(__file__).parent / "golden"
THROUGH = ["submit", "docker"]
# One value for each type of an option.
VALUES = {
    "integer": ["2"],
    "integer x2": ["3", "4"],
    "float": ["0.5"],
    "float range": ["5"],
    "integer range": ["5"],
    "text": ["-a b"],
    "path": ["some file"],
    "hosts": ["a:1,b:2"],
    "names": ["eth0,eth1"],
    "variable": ["A=b c"],
    "steps": ["3-5"],
}


def command(name: str) -> click.Command:
    found: click.Command = getattr(importlib.import_module(f"hvdtrain.cli.{name}"), name)
    return found


def shape(parameter: click.Parameter) -> str:
    """A line for an option or an argument."""
    if not isinstance(parameter, click.Option):
        return f"{parameter.human_readable_name} x{parameter.nargs}"
    names = " ".join([*parameter.opts, *parameter.secondary_opts])
    kind = parameter.type
    shape = "|".join(kind.choices) if isinstance(kind, click.Choice) else kind.name
    shape += f" x{parameter.nargs}" if parameter.nargs > 1 else ""
    default = parameter.to_info_dict()["default"]
    repeated = ", again and again" if parameter.multiple else ""
    variables = " ".join(parameter.envvar or ())
    return f"{names} [{shape}{repeated}] default {default} from {variables}"


@pytest.mark.parametrize("name", ["run", *THROUGH])
def test_the_options_are_these(name: str) -> None:
    """An option is a promise. If a difference is on purpose, renew the lists:
    HVDTRAIN_RENEW_GOLDEN=1 pytest tests/unit/test_launch_commands.py -k options_are_these"""
    path = GOLDEN / f"{name}_options.txt"
    listed = "".join(f"{shape(one)}\n" for one in command(name).params)
    if os.environ.get("HVDTRAIN_RENEW_GOLDEN"):
        path.write_text(listed)
    assert listed == path.read_text(), test_the_options_are_these.__doc__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def part_of(name: str, *words: str) -> RunPart:
    part: RunPart = command(name).make_context(name, list(words)).obj
    return part


def of_launch() -> list[click.Option]:
    about = {"config", "show_config", "dry_run", "check_build", "version", "help_all"}
    return [one for one in run.params if isinstance(one, click.Option) and one.name not in about]


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("option", of_launch(), ids=lambda one: one.opts[0])
def test_every_option_of_run_goes_through(folder: Path, name: str, option: click.Option) -> None:
    """By each of its names; run reads the same in what is passed on as in what was typed."""
    params = [one for one in command(name).params if one.expose_value]
    own = {flag for one in params for flag in one.opts}
    if option.name in {one.name for one in params}:
        own |= set(option.opts)
    kind = option.type
    values = VALUES.get(f"{kind.name} x2" if option.nargs > 1 else kind.name, [])
    if isinstance(kind, click.Choice):
        values = [kind.choices[-1]]
    values = [] if option.is_flag else values
    for flag in [*option.opts, *option.secondary_opts]:
        if flag in own or flag == "--gpus":
            continue
        typed = [flag, *values, "train.py", "--epochs", "3"]
        part = part_of(name, *typed)
        assert part.program == ("train.py", "--epochs", "3")
        passed = run.make_context("run", list(part.words))
        direct = run.make_context("run", typed)
        assert passed.params == direct.params
        assert passed.get_parameter_source(option.name) == direct.get_parameter_source(option.name)


def test_the_two_parts_of_the_line(folder: Path) -> None:
    part = part_of(
        "docker", "--image", "a:b", "-np", "4", "--shm-size=1g", "train.py", "--image", "x"
    )
    assert part.words == ("-np", "4", "train.py", "--image", "x")
    part = part_of("submit", "-N4", "-np", "4", "-p", "gpu", "--ssh-port=7", "--", "-t.py", "-N")
    assert part.words == ("-np", "4", "--ssh-port", "7", "--", "-t.py", "-N")
    part = part_of("docker", "--config", "c.yaml", "--", "foo", "bar")
    assert part.words == ("--config", "c.yaml", "--", "foo", "bar"), (
        "arguments of the file's script"
    )
    part = part_of("submit", "--mpi-args=-mca a b", "--env", "A=1", "--env=B=2", "train.py")
    assert part.options == ("--mpi-args=-mca a b", "--env", "A=1", "--env", "B=2")


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="hvdtrain")


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cycle-time-mss", "1", "train.py"], "Did you mean '--cycle-time-ms'?"),
        (["--cycle-time-ms", "fast", "train.py"], "'fast' is not a valid float"),
        (["-H", "a", "train.py"], "cannot read 'a' in the host list"),
        (["--controller", "gluu", "train.py"], "'gluu' is not one of"),
        (["--config", "wrong.yaml", "train.py"], "there is no option 'nodes'"),
        (["none.py"], "no such script: none.py"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_mistakes_in_the_part_of_run_are_said_here(
    folder: Path, name: str, words: list[str], message: str
) -> None:
    (folder / "wrong.yaml").write_text("nodes: 4\n")
    own = ["--engine", "docker", "--gpus", "none"] if name == "docker" else []
    result = call(name, "--dry-run", *own, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_job_and_a_container_with_launch_options(folder: Path) -> None:
    words = ["--cycle-time-ms", "1", "--gloo", "-m", "pkg.mod", "--epochs", "3"]
    job = call("submit", "--dry-run", *words).stdout
    assert "run --cycle-time-ms 1 --controller gloo --module pkg.mod --epochs 3\n" in job
    assert "#SBATCH --job-name=pkg.mod\n" in job
    own = ["--dry-run", "--engine", "docker", "--gpus", "none"]
    assert call("docker", *own, *words).stdout.endswith(
        " hvdtrain run --cycle-time-ms 1 --controller gloo --module pkg.mod --epochs 3\n"
    )
    (folder / "run.yaml").write_text("script: train.py\ncontroller: gloo\n")
    assert "run --config run.yaml\n" in call("submit", "--dry-run", "--config", "run.yaml").stdout


@pytest.mark.parametrize("name", THROUGH)
def test_help_shows_all_options(name: str) -> None:
    short, shown = (" ".join(call(name, word).stdout.split()) for word in ("--help", "--help-all"))
    for option in of_launch():
        if isinstance(option, GroupedOption) and f"{name} {option.name}" != "docker np":
            assert option.shown[0] in shown
    assert "--dry-run" in short
    assert "--cycle-time-ms" not in short
    assert "More with --help-all: Output, Reaching other hosts," in short


def test_help_of_run_fits_two_screens() -> None:
    assert len(call("run", "--help").stdout.splitlines()) <= 2 * 48
