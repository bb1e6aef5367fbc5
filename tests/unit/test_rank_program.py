"""What the words behind the options are taken for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.rank_program import Program, program_of, rank_command

REPOSITORY = Path(__file__).parents[2]
OWN = Path(sys.executable)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a file of each kind; its `bin` is in PATH, behind this Python's."""
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "bin"
    other.mkdir()
    files = {
        "train.py": ("import this\n", 0o644),
        "shebang": ("#!/usr/bin/env python3\n", 0o755),
        "plain": ("print()\n", 0o644),
        "job.sh": ("#!/bin/bash\n", 0o755),
        "not_executable.sh": ("#!/bin/bash\n", 0o644),
        "bin/python3.9": ("#!/bin/sh\n", 0o755),
        "bin/solver": ("#!/bin/sh\n", 0o755),
    }
    for name, (text, mode) in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("PATH", f"{OWN.parent}:{other}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "kind", "command"),
    [
        ("train.py -x", "script", "train.py -x"),
        ("shebang", "script", "shebang"),
        ("plain", "script", "plain"),
        ("missing.py", "script", "missing.py"),
        ("missing", "script", "missing"),
        ("python train.py -x", "script", "train.py -x"),
        ("python3 train.py", "script", "train.py"),
        ("python -m pkg.mod -x", "module", "-m pkg.mod -x"),
        ("bash job.sh", "program", "--program bash job.sh"),
        ("./job.sh a", "program", "--program job.sh a"),
        ("solver", "program", "--program solver"),
        ("python -c print() a", "program", "--program python -c print() a"),
    ],
)
def test_kinds(folder: Path, words: str, kind: str, command: str) -> None:
    name, *arguments = words.split()
    found = program_of(Path(name), arguments)
    assert found.kind == kind
    assert rank_command(found) == [str(OWN), "-P", "-m", "hvdtrain.worker", *command.split()]


def test_the_interpreter_and_its_options(folder: Path) -> None:
    words = ["-u", "-X", "utf8", "-Werror", "-W", "default", "train.py", "-m"]
    found = program_of(Path("python3.9"), words)
    assert found == Program(
        Path("train.py"), ("-m",), "script", str(folder / "bin/python3.9"), tuple(words[:6])
    )
    assert rank_command(found)[1:10] == [*words[:6], "-P", "-m", "hvdtrain.worker"]
    assert program_of(OWN, ["-O", "-m", "a.b"]).python_options == ("-O",)


def test_a_module(folder: Path) -> None:
    found = program_of(Path("pkg.mod"), ["-x"], module=True)
    assert rank_command(found) == [str(OWN), "-P", "-m", "hvdtrain.worker", "-m", "pkg.mod", "-x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("not_executable.sh", "nor executable: chmod +x not_executable.sh, or name"),
        ("python", "the script is missing"),
        ("python -u", "the script is missing"),
        ("python -m", "the name of the module is missing"),
        ("python -m a/b.py", "-m a/b.py: expected the name of a module"),
        ("python3.7 train.py", "there is no python3.7 in PATH"),
    ],
)
def test_what_cannot_be_run(folder: Path, words: str, message: str) -> None:
    name, *arguments = words.split()
    with pytest.raises(UsageError, match=message.replace("+", r"\+").replace("?", r"\?")):
        program_of(Path(name), arguments)


def work(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.worker", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_rank_runs_a_module(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "mod.py").write_text(
        "import sys\nfrom . import __name__ as package\nprint(__name__, package, sys.argv)\n"
    )
    done = work(tmp_path, "-m", "pkg.mod", "-x")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == f"__main__ pkg ['{tmp_path / 'pkg' / 'mod.py'}', '-x']\n"
    assert "No module named pkg.no" in work(tmp_path, "-m", "pkg.no").stderr


def test_a_rank_becomes_another_program(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text('echo "$1" $OMP_NUM_THREADS\nexit 3\n')
    done = work(tmp_path, "--program", "bash", "job.sh", "a b")
    assert done.returncode == 3
    assert done.stdout.startswith("a b ")
    assert done.stdout.split()[2].isdecimal()
    (tmp_path / "job.sh").chmod(0o755)
    (tmp_path / "job.sh").write_text("#!/bin/sh\nexit 4\n")
    assert work(tmp_path, "--program", "job.sh").returncode == 4
    missing = work(tmp_path, "--program", "no-such-program")
    assert missing.returncode == 2
    assert "cannot start no-such-program: No such file or directory" in missing.stderr
