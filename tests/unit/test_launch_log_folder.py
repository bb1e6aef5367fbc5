"""The folder of a run's files."""

import errno
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from terminal import Terminal

from hvdtrain.errors import UsageError
from hvdtrain.launch.running.log_folder import KEPT_RUNS, is_running, make_log_dir, running_in
from hvdtrain.launch.running.run_status import RunStatus


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def run_in(folder: Path, text: bytes) -> None:
    Terminal(make_log_dir(folder)).run(b"[0]<stdout>:" + text, b"[0]<stderr>:" + text)


def test_a_log_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        UsageError, match=r"log folder .* is not writable: choose another with --log"
    ):
        make_log_dir(tmp_path)


def test_files_of_two_runs_do_not_mix(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "logs"
    for number in range(3):
        run_in(folder, b"%d\n" % number)
    assert (folder / "rank.0/stdout").read_bytes() == b"2\n"
    assert (folder / "earlier-2/rank.0/stdout").read_bytes() == b"1\n"
    assert (folder / "earlier-1/rank.0/stderr").read_bytes() == b"0\n"
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        f"Warning: the files of an earlier run in {folder} are now in {folder / 'earlier-1'}"
    )
    assert len(said) == 2


def test_other_files_in_the_log_folder_stay(home: Path) -> None:
    folder = home / "logs"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/notes").touch()
    run_in(folder, b"0\n")
    run_in(folder, b"1\n")
    assert {path.name for path in folder.iterdir()} == {"mine", "rank.0", "earlier-1"}


def test_a_folder_of_a_run_that_lasts_is_not_used_again(home: Path) -> None:
    folder = make_log_dir(home / "logs")
    with running_in(folder):
        assert is_running(folder)
        with pytest.raises(
            UsageError, match=r"another run is writing its output to .*logs: choose"
        ):
            make_log_dir(folder)
    assert not is_running(folder)
    assert make_log_dir(folder) == folder


def test_without_locks_a_run_lasts_as_long_as_it_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    folder = make_log_dir(home / "logs")
    with running_in(folder):
        RunStatus("1", "train.py").with_ranks([]).write(folder)
        assert is_running(folder)
        replace(RunStatus("1", "train.py"), updated=time.time() - 100).write(folder)
        assert not is_running(folder)
        assert make_log_dir(folder) == folder, "a requeued job starts where it was killed"


def test_the_last_runs_are_kept_and_those_that_last(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(100)
    monkeypatch.setattr(time, "strftime", lambda form: f"20300101-000{next(seconds)}")
    first = make_log_dir(None)
    (first / "rank.0").mkdir()
    Path(".hvdtrain/logs/mine").mkdir()
    second = make_log_dir(None)
    with running_in(second):
        made = [make_log_dir(None) for _ in range(KEPT_RUNS)]
    kept = {path.name for path in Path(".hvdtrain/logs").iterdir()}
    assert kept == {"mine", second.name, *(path.name for path in made)}
    assert {path.stat().st_mode & 0o777 for path in (second, *second.parents[:2])} == {0o700}


def test_where_nothing_can_be_written_the_logs_are_elsewhere(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".hvdtrain").touch()  # No folder can be made.
    folder = make_log_dir(None)
    assert (folder.parent, folder.stat().st_mode & 0o777) == (home, 0o700)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Warning: cannot write to .hvdtrain/logs (")
    assert said.endswith(f"the logs of this run are in {folder}")
