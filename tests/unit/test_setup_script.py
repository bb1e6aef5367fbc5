"""scripts/setup.sh: its options, and what it says before it starts anything."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "scripts/setup.sh"
USED = ("awk", "cat", "cut", "df", "dirname", "grep", "head", "ls", "mktemp", "sha256sum", "tail")
EXTRAS = "cloud, mlflow, tensorboard, wandb, report, examples, test"
"""As the messages list them: those of setup.cfg that --with takes."""


WITHOUT_CUDA = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none /usr/local/cuda && exec "$@"',
    "sh",
)
"""Run a command as on a machine without CUDA; needs root."""


def setup(
    *arguments: str, path: str | None = None, venv: Path | None = None, within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    if venv:
        environment["HVDTRAIN_VENV"] = str(venv)
    bash = shutil.which("bash")
    assert bash
    return subprocess.run(
        [*within, bash, str(SETUP), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with what the script itself uses, and neither compiler nor make."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in USED:
        program = shutil.which(name)
        assert program, name
        (folder / name).symlink_to(program)
    return folder


def add_python(folder: Path, name: str = "python3") -> None:
    # A script, not a link: through a link Python takes itself for an installation in that folder.
    (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unknown option: --bogus"),
        (["extra"], "unknown option: extra"),
        (["--python"], "--python needs a value"),
        (["--venv", ""], "--venv needs a value"),
        (["--with", "a b"], f"--with takes {EXTRAS}, separated by commas"),
        (["--with", "test,"], f"--with takes {EXTRAS}, separated by commas"),
        (["--with", "test,nonsense"], f"--with takes {EXTRAS}, not nonsense"),
        (["--with", "gpu"], f"--with takes {EXTRAS}, not gpu"),
        (["--with", "tes"], "not tes"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], says: str) -> None:
    done = setup(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_help() -> None:
    done = setup("--help")
    assert done.returncode == 0
    for words in (
        "--gpu",
        "--system-mpi",
        "--python",
        "--venv",
        f"commas: {EXTRAS}\n",
    ):
        assert words in done.stdout


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_help_of_the_others_sets_nothing_up(name: str) -> None:
    told = subprocess.run([SETUP.with_name(name), "--help"], capture_output=True, timeout=10)
    assert told.returncode == 0
    assert told.stdout.startswith(b"Sets up") and b"#" not in told.stdout


def test_python_that_does_not_exist(tmp_path: Path) -> None:
    done = setup("--python", "no-such-python", venv=tmp_path / "venv")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["  --python no-such-python: no such program."]
    assert not (tmp_path / "venv").exists()


def test_python_that_is_not_supported(bare_path: Path, tmp_path: Path) -> None:
    old = bare_path / "oldpython"
    old.write_text('#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    done = setup("--python", "oldpython", path=str(bare_path), venv=tmp_path / "venv")
    assert done.returncode == 1
    assert "not a working Python 3.11, 3.12 or 3.13 (Python 3.9.1)" in done.stderr


def test_no_python_at_all(bare_path: Path, tmp_path: Path) -> None:
    broken_shim = bare_path / "python3"
    broken_shim.write_text("#!/bin/sh\nexit 127\n")
    broken_shim.chmod(0o755)
    done = setup(path=str(bare_path), venv=tmp_path / "venv")
    assert done.returncode == 1
    assert "No Python 3.11, 3.12 or 3.13 in PATH" in done.stderr


def test_all_that_is_missing_is_said_before_anything_starts(
    bare_path: Path, tmp_path: Path
) -> None:
    add_python(bare_path)
    small = bare_path / "df"
    small.unlink()
    small.write_text("#!/bin/sh\necho header\necho disk 1000 1 12 99% /\n")
    small.chmod(0o755)
    done = setup("--system-mpi", path=str(bare_path), venv=tmp_path / "venv")
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert first == "setup.sh cannot start:"
    starts = ["No C++ compiler", "No make", "--system-mpi, but", "12 MB free"]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"  {start}")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("named", [False, True])
def test_gpu_without_cuda_is_said_before_gigabytes_are_downloaded(
    bare_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """CUDA_HOME counts more than an nvcc in PATH, for the installer too."""
    add_python(bare_path)
    for name in ("c++", "make", *(["nvcc"] if named else [])):
        (bare_path / name).write_text("#!/bin/sh\n")
        (bare_path / name).chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    within: Sequence[str] = ()
    if named:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    elif Path("/usr/local/cuda/bin/nvcc").exists():
        if os.geteuid() != 0:
            pytest.skip("there is CUDA here, and hiding it needs root")
        within = (str(shutil.which(WITHOUT_CUDA[0])), *WITHOUT_CUDA[1:])
        for name in ("sh", "mount"):
            (bare_path / name).exists() or (bare_path / name).symlink_to(str(shutil.which(name)))
    venv = tmp_path / "venv"
    done = setup("--gpu", path=str(bare_path), venv=venv, within=within)
    assert done.returncode == 1
    where = tmp_path / "cuda" if named else "PATH or /usr/local/cuda"
    assert f"--gpu, but there is no CUDA 12 toolkit (nvcc) in {where}: install it" in done.stderr
    assert not venv.exists()


def test_folder_with_other_things_in_it_is_left_alone(bare_path: Path, tmp_path: Path) -> None:
    add_python(bare_path)
    for name in ("c++", "make"):
        (bare_path / name).write_text("#!/bin/sh\n")
        (bare_path / name).chmod(0o755)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    done = setup("--venv", str(tmp_path / "mine"), path=str(bare_path))
    assert done.returncode == 1
    assert "is not empty and not a virtual environment" in done.stderr
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_environment_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    record = tmp_path / "venv" / "hvdtrain-setup"
    record.parent.mkdir()
    record.write_text("gpu, system MPI, Python 3.11\n")
    done = setup(venv=record.parent)
    assert done.returncode == 1
    assert "was set up for 'gpu, system MPI, Python 3.11'" in done.stderr
    assert record.read_text() == "gpu, system MPI, Python 3.11\n"
