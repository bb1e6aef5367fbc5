"""Manage the folder with the log files of a run, which only the user can read.

Without --log-dir, a run creates a folder under `.hvdtrain/logs`, where the most recent ones are kept. In
a folder named by the user, the files of an earlier run are moved aside, so that two runs never mix.
While a run lasts, it holds a lock in its folder, which is then neither removed nor reused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.running.run_status import WRITE_SECONDS, read_status

KEPT_RUNS = 20
LOGS = Path(".hvdtrain/logs")
"""Folder of the runs' folders, in the working folder."""
_NAME = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
_LOCK = ".running"
# What a file system without locks answers, such as Lustre mounted without flock.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_SILENT_SECONDS = 12 * WRITE_SECONDS
"""Time without a new status after which a run counts as ended, where its lock cannot tell."""
_STREAMS = {"stdout", "stderr"}
_CHOOSE = "choose another with --log-dir"


def make_log_dir(wanted: Path | None) -> Path:
    """Create the folder for a run's files; a new one if none is wanted.

    Raises:
        UsageError: The folder cannot be created or written to, or another run uses it.
    """
    if wanted is None:
        return _new_folder()
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(wanted, os.W_OK | os.X_OK):
            raise UsageError(f"the log folder {wanted} is not writable: {_CHOOSE}")
        if is_running(wanted):
            raise UsageError(f"another run is writing its output to {wanted}: {_CHOOSE}")
        _move_aside(wanted)
    except OSError as error:
        raise UsageError(
            f"cannot create the log folder {wanted}: {error.strerror}; {_CHOOSE}"
        ) from error
    return wanted


@contextlib.contextmanager
def running_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock for the duration of the context, if the file system supports locks."""
    lock = folder / _LOCK
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Return whether `folder` belongs to a run that is, or may be, still running."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return True
        # The run may have been killed, or be one on another host.
        status = read_status(folder)
        return status is not None and time.time() - status.updated < _SILENT_SECONDS
    finally:
        os.close(descriptor)
    return False


def _new_folder() -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        for folder in (LOGS.parent, LOGS):
            folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(1, 1000):
            path = LOGS / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                _remove_old(path)
                return path
        raise UsageError(f"too many log folders in {LOGS}: {_CHOOSE}")
    except OSError as error:
        return _elsewhere(error)


def _elsewhere(error: OSError) -> Path:
    """Fall back to a temporary folder: training should not fail for want of a log folder."""
    try:
        path = tempfile.mkdtemp(prefix="hvdtrain-logs-")
    except OSError as second:
        raise UsageError(
            f"cannot create a log folder, neither {LOGS} ({error.strerror}) nor one for "
            f"temporary files ({second.strerror}): {_CHOOSE}"
        ) from second
    _warn(f"cannot write to {LOGS} ({error.strerror}): the logs of this run are in {path}")
    return Path(path)


def _remove_old(new: Path) -> None:
    """Remove the oldest folders, keeping KEPT_RUNS including the new one, and those of unfinished runs."""
    runs = sorted(
        (match[1], int(match[2] or 1), path)
        for path in LOGS.iterdir()
        if path != new and (match := _NAME.fullmatch(path.name)) and not path.is_symlink()
    )
    for *_, path in runs[: 1 - KEPT_RUNS]:
        with contextlib.suppress(OSError):
            if not is_running(path):
                shutil.rmtree(path)


def _move_aside(folder: Path) -> None:
    earlier = [path for path in folder.iterdir() if _is_of_run(path)]
    if not earlier:
        return
    number = 1
    while (target := folder / f"earlier-{number}").exists():
        number += 1
    target.mkdir(mode=0o700)
    for path in earlier:
        path.rename(target / path.name)
    _warn(f"the files of an earlier run in {folder} are now in {target}")


def _is_of_run(path: Path) -> bool:
    """Return whether a run created this: its launcher's log, its status, or a folder with a rank's output."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        return bool(names) and names <= _STREAMS
    return path.name in ("launcher.log", "status.json")


def _warn(text: str) -> None:
    print(f"Warning: {text}", file=sys.stderr)
