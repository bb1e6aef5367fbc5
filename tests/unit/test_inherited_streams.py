"""`hvdtrain run` from parents that leave it little: closed streams, ignored signals, no folder."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "hvdtrain.cli", "run", "--strategy", "central-storage", "-np", "1")


def run(folder: Path, after: str = "", **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run a script by a shell, which puts `after` behind the command."""
    script = folder / "train.py"
    if folder.is_dir():
        script.write_text("import sys\nprint('one')\nprint('two', file=sys.stderr)\n")
    return subprocess.run(
        f"{shlex.join([*RUN, '--log-dir', str(folder / 'logs'), str(script)])} {after}",
        shell=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=60,
        **{"cwd": folder, **options},  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    ("after", "stdout", "stderr"),
    [
        (">&-", b"", b"two\n"),
        ("2>&-", b"one\n", b""),
        ("<&-", b"one\n", b"two\n"),
        ("<&- >&- 2>&-", b"", b""),
    ],
)
def test_streams_may_be_closed(tmp_path: Path, after: str, stdout: bytes, stderr: bytes) -> None:
    done = run(tmp_path, after)
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, stderr)
    assert (tmp_path / "logs/rank.0/stdout").read_bytes() == b"one\n"
    assert (tmp_path / "logs/rank.0/stderr").read_bytes() == b"two\n"


def test_children_are_heeded_where_the_parent_does_not(tmp_path: Path) -> None:
    """The system would forget how they ended, and a run that is well would fail."""
    done = run(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\n", b"two\n")


def test_a_working_folder_that_is_gone_is_one_message(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = run(folder, cwd=folder, preexec_fn=lambda: shutil.rmtree(folder))
    assert (done.returncode, done.stdout) == (2, b"")
    said = b"Error: the working folder has been deleted: change to another one\n"
    assert (
        done.stderr.endswith(said) and b"Traceback" not in done.stderr
    )  # The shell complains too.


@pytest.mark.parametrize("command", ["--help", "run --help", "ps", "submit --dry-run -- train.py"])
@pytest.mark.parametrize(
    ("after", "code", "stderr"),
    [
        (">/dev/full", 1, b"Error: cannot write the output: No space left on device\n"),
        (">/dev/full 2>&1", 1, b""),
        ("| true; exit ${PIPESTATUS[0]}", 1, b""),
        (">&-", 0, b""),
    ],
)
def test_output_that_cannot_be_written(
    tmp_path: Path, command: str, after: str, code: int, stderr: bytes
) -> None:
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m hvdtrain.cli {command} {after}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, stderr)
