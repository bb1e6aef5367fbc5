"""What the README says is there and works: commands, options, code, paths and names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hvdtrain.cli import main
from hvdtrain.environment import STALL_SHUTDOWN_SECONDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
WORDS = sorted(set(re.findall(r"`([^`\n]+)`", PROSE)))
# Commands that change the machine, or that CI runs itself.
NOT_HERE = ("./scripts/quickstart.sh", "./scripts/test.sh", ".", "pip", "horovodrun")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of every command; comments are left out."""
    lines = "".join(blocks("sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def long_options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--"))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from long_options(found)


def parse(words: list[str]) -> None:
    """Raise click.UsageError for a command, option or value that is not there; run nothing."""
    command: click.Command | None = main
    while isinstance(command, click.Group):
        name, *words = words
        command = command.get_command(click.Context(command), name)
    assert command is not None, name
    command.make_context(command.name, words)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def test_the_two_commands_are_there_and_ci_runs_the_second() -> None:
    assert commands()[:2] == [["./scripts/quickstart.sh"], ["./scripts/test.sh"]]
    for (script,) in commands()[:2]:
        assert os.access(ROOT / script, os.X_OK)
    assert "exec scripts/test.sh --all" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", commands(), ids=shlex.join)
def test_command(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = command
    if program in NOT_HERE or command == ["python", "train.py"]:  # the latter: see test_example
        return
    assert program == "hvdtrain"
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("run.yaml").write_text("script: train.py\nnum-proc: 2\n")
    parse(rest)
    if rest[0] != "run":
        return
    result = CliRunner().invoke(main, ["run", "--dry-run", *rest[1:]], prog_name="hvdtrain")
    assert result.exit_code == 0, result.output
    printed = shlex.split(result.stdout)
    program = "hvdtrain.worker" if "--strategy" in rest else "horovodrun"
    assert any(word.endswith(program) for word in printed)
    assert {"train.py", "package.module"} & set(printed)


def test_extras_are_there() -> None:
    extras = set(re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE))
    named = re.findall(r"\.\[([\w,]+)\]", TEXT)
    assert named
    assert {extra for names in named for extra in names.split(",")} <= extras


def test_example(tmp_path: Path) -> None:
    """The Trainer example works, in one process, and run_dir holds what the text below it says."""
    example, _ = blocks("python")
    ((option, written),) = re.findall(r"`(run_dir=.*)`, .*? writes (.*) there", PROSE)
    example = example.replace("epochs=10", "epochs=1")
    example = example.replace("global_batch_size=32,", f"global_batch_size=32, {option},")
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "train.py"]
    job = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    assert re.search(r"Evaluation .*accuracy: 0\.\d+", job.stdout)
    found = sorted(path.name for path in (tmp_path / "run-1").iterdir())
    assert found == sorted(re.findall(r"[\w.]+\.\w+", written))


def test_layout() -> None:
    import hvdtrain

    _, example = blocks("python")
    names: dict[str, Any] = {"hvdtrain": hvdtrain}
    exec(example, names)
    assert names["layout"].mesh.for_ranks(8).data == 2


def test_moving_a_script_changes_one_import() -> None:
    (change,) = blocks("diff")
    assert [line[0] for line in change.splitlines()] == ["-", "+"]
    exec(change.splitlines()[1][1:], {})


@pytest.mark.parametrize("word", [w for w in WORDS if "/" in w and " " not in w and w[0] != "."])
def test_path(word: str) -> None:
    assert (ROOT / word).exists()


@pytest.mark.parametrize("word", [w for w in WORDS if re.fullmatch(r"hvdtrain(\.\w+)+", w)])
def test_name(word: str) -> None:
    module, _, name = word.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_options() -> None:
    known = set(long_options(main))
    scripts = "".join((ROOT / "scripts" / name).read_text() for name in ("setup.sh", "test.sh"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named >= {"--dry-run", "--gpu"}
    unknown = named - known - set(re.findall(r"--[a-z-]+", scripts))
    assert unknown == {"--epochs"}  # of the user's script


def test_figures() -> None:
    assert f"wait {STALL_SHUTDOWN_SECONDS} s for another" in TEXT


def test_every_training_script_and_folder_is_named() -> None:
    for script in (ROOT / "scripts").glob("*.py"):
        assert f"`scripts/{script.name}`" in TEXT
    packages = [path.parent for path in (ROOT / "hvdtrain").glob("*/__init__.py")]
    assert packages
    for package in packages:
        assert f"`hvdtrain/{package.name}/`" in TEXT
