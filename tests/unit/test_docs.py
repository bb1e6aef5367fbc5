"""What README, docs/ and CONTRIBUTING.md say is there and works: commands, options, code, links, paths and names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.environment import EXIT_HANG, HANG_SECONDS, STALL_SHUTDOWN_SECONDS
from hvdtrain.launch.running.watchdog import STILL_SECONDS, WAITING_SECONDS

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
README = PAGES["README.md"]
# Commands that change the machine or go on for long. CI runs the first two itself.
NOT_HERE = (
    "./scripts/quickstart.sh",
    "./scripts/test.sh",
    "./scripts/setup.sh",
    "patch",
    ".",
    "pip",
    "horovodrun",
    "docker",
    "mkdir",
)
# These have tests of their own, which run them.
RUN_ELSEWHERE = {"docs/notebooks.md", "docs/adding-a-launcher.md"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of every command; comments are left out."""
    lines = "".join(blocks(text, "sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def all_commands() -> list[tuple[str, ...]]:
    return sorted({tuple(words) for text in PAGES.values() for words in commands(text)})


def quoted() -> list[str]:
    """What stands between backquotes on any page."""
    return sorted(
        {word for text in PAGES.values() for word in re.findall(r"`([^`\n]+)`", prose(text))}
    )


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


def test_the_two_commands_are_there_and_ci_runs_the_second() -> None:
    assert commands(README)[:2] == [["./scripts/quickstart.sh"], ["./scripts/test.sh"]]
    for (script,) in commands(README)[:2]:
        assert os.access(ROOT / script, os.X_OK)
    assert "exec scripts/test.sh --all" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", all_commands(), ids=shlex.join)
def test_command(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = command
    if program in NOT_HERE or command == ("python", "train.py"):  # the latter: see test_example
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


def test_examples_begin_with_init() -> None:
    """Whoever copies one: on GPUs a model that is made before is an error."""
    begun = [
        block.index("hvdtrain.init()") < block.index("Trainer(")
        for page in PAGES.values()
        for block in blocks(page, "python")
        if "import hvdtrain\n" in block and "Trainer(" in block
    ]
    assert len(begun) > 5 and all(begun)


def test_extras_are_there() -> None:
    extras = set(re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE))
    named = re.findall(r"\.\[([\w,]+)\]", README)
    assert named
    assert {extra for names in named for extra in names.split(",")} <= extras


@pytest.mark.parametrize(
    "page",
    [
        # The README is what everyone reads; the rest takes minutes.
        pytest.param(name, marks=() if name == "README.md" else pytest.mark.slow)
        for name in PAGES
        if blocks(PAGES[name], "python") and name not in RUN_ELSEWHERE
    ],
)
def test_example(page: str, tmp_path: Path) -> None:
    """The page's Python, one block after the other, in one process."""
    code = "\n".join(blocks(PAGES[page], "python")).replace("epochs=10", "epochs=1")
    (tmp_path / "train.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    for option, written in re.findall(r"`run_dir=\"(.*)\"`, .*? writes (.*) there", PAGES[page]):
        found = sorted(path.name for path in (tmp_path / option).iterdir())
        assert found == sorted(re.findall(r"[\w.]+\.\w+", written))


def test_moving_a_script_changes_one_import() -> None:
    (change,) = blocks(PAGES["docs/horovod.md"], "diff")
    assert [line[0] for line in change.splitlines()] == ["-", "+"]
    exec(change.splitlines()[1][1:], {})


@pytest.mark.parametrize(
    "word", [w for w in quoted() if re.fullmatch(r"[\w-][\w.-]*(/[\w.*-]+)+/?", w)]
)
def test_path(word: str) -> None:
    assert any(ROOT.glob(word.rstrip("/"))), word


@pytest.mark.parametrize("word", [w for w in quoted() if re.fullmatch(r"hvdtrain(\.\w+)+", w)])
def test_name(word: str) -> None:
    module, _, name = word.rpartition(".")
    try:
        importlib.import_module(word)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), name)


def test_options() -> None:
    known = set(long_options(main))
    scripts = "".join((ROOT / "scripts" / name).read_text() for name in ("setup.sh", "test.sh"))
    named = {
        option
        for text in PAGES.values()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }
    assert named >= {"--dry-run", "--gpu"}
    assert named - known - set(re.findall(r"--[a-z-]+", scripts)) <= {
        *("--epochs", "--password"),  # of the user's script
        *("--allow-run-as-root", "--oversubscribe", "--tag-output"),  # of mpirun
        "--config-file",  # of horovodrun
        *("--constraint", "--no-requeue"),  # of sbatch
        *("--build", "--format", "--rm", "--ulimit"),  # of docker and podman
        *("--strict", "--write"),  # of mkdocs, and of the table of what is exact
    }


def test_figures() -> None:
    hangs = PAGES["docs/troubleshooting.md"]
    assert f"wait {STALL_SHUTDOWN_SECONDS} s for another" in hangs
    assert f"frozen or has gone | {STILL_SECONDS:.0f} s |" in hangs
    assert f"does not compute | {WAITING_SECONDS:.0f} s |" in hangs
    assert f"`--hang-timeout`, {HANG_SECONDS:.0f} s |" in hangs
    assert f"exit code {EXIT_HANG}" in hangs


def test_every_page_script_and_folder_is_named() -> None:
    for page in PAGES.keys() - {"README.md", "docs/index.md"}:
        assert f"({page})" in README or f"({page.removeprefix('docs/')})" in PAGES["docs/index.md"]
    for script in (ROOT / "scripts").glob("*.py"):
        assert f"`scripts/{script.name}`" in PAGES["docs/training.md"]
    packages = [path.parent for path in (ROOT / "hvdtrain").glob("*/__init__.py")]
    assert packages
    for package in packages:
        assert f"`hvdtrain/{package.name}/`" in PAGES["docs/architecture.md"]


def test_links_outside_docs() -> None:
    """Those between the pages of docs/ are checked by the build."""
    for page in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
            path, _, anchor = link.partition("#")
            assert (ROOT / path).is_file(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            }
            assert not anchor or anchor in slugs, link


def test_pages_build(tmp_path: Path) -> None:
    """Every link, anchor and name of the reference is there: mkdocs is strict."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    assert 'id="hvdtrain.trainer.Trainer.fit"' in reference
