"""Secret variables for the ranks of another host, passed in a file because command lines are visible to everybody.

The file is in a folder with an unpredictable name, which only this user can enter, and exists as long as the launch.
Ranks search this user's own folders only, and ignore those that somebody else has made, whatever their names. Over
Gloo, a rank on another host is started by an ssh command that contains its variables, which everybody on both hosts
can read; over MPI, and on the launcher's own host, variables are not visible.

The agent that delivered a file holds a lock on it, which ends with the process, however it ends. So the next delivery
on this host removes what an agent that was killed could not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError

_PREFIX = "hvdtrain-brought-"
_GRACE_SECONDS = 600
"""Age from which a file must be locked: it is written before."""


def deliver(launch_id: str, variables: Mapping[str, str], parent: Path = Path("/tmp")) -> Path:
    """Write the variables for the launch's ranks on this host; return the path of the file.

    Also removes the files of this user's agents on this host that were killed.

    Raises:
        HvdtrainError: The file cannot be written.
    """
    _remove_left_behind(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)) / _name(launch_id)
        path.touch(mode=0o600)
        path.write_text(json.dumps(dict(variables)), encoding="utf-8")
    except OSError as error:
        raise HvdtrainError(
            f"cannot keep secret variables in {parent}: {error.strerror or error}"
        ) from error
    return path


def hold(path: Path) -> IO[bytes]:
    """Return a delivered file, locked until it is closed or the process ends."""
    file = path.open("rb")
    # On a file system without locks, nothing is removed either.
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def delivered(launch_id: str, parent: Path = Path("/tmp")) -> dict[str, str]:
    """Return the variables that were delivered to this host for the launch; empty if there are none."""
    for path in _files(launch_id, parent):
        variables: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return variables
    return {}


def withdraw(launch_id: str, parent: Path = Path("/tmp")) -> None:
    """Remove the delivered file and its folder."""
    for path in _files(launch_id, parent):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def _remove_left_behind(parent: Path) -> None:
    for path in _files("*", parent):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # Raises BlockingIOError while the agent lives.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > _GRACE_SECONDS:
                _remove(path)


def _files(launch_id: str, parent: Path) -> Iterator[Path]:
    """Yield the files of a launch for this host; "*": of all launches."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_private(folder):
            yield from (path for path in folder.glob(_name(launch_id)) if path.is_file())


def _name(launch_id: str) -> str:
    # Hosts may share the parent folder.
    return f"{launch_id}.{platform.node()}.json".replace(os.sep, "_")


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False  # It belonged to another launch, which has just ended.
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return own and not stat.S_IMODE(found.st_mode) & 0o077
