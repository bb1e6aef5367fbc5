"""Secret variables for the ranks of another host, passed in a file because command lines are visible to everybody.

The file is in a folder with an unpredictable name, which only this user can enter, and exists as long as the launch.
Ranks search this user's own folders only, and ignore those that somebody else has made, whatever their names. Over
Gloo, a rank on another host is started by an ssh command that contains its variables, which everybody on both hosts
can read; over MPI, and on the launcher's own host, variables are not visible.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.errors import HvdtrainError

_PREFIX = "hvdtrain-brought-"


def deliver(launch_id: str, variables: Mapping[str, str], parent: Path = Path("/tmp")) -> Path:
    """Write the variables for the launch's ranks on this host; return the path of the file.

    Raises:
        HvdtrainError: The file cannot be written.
    """
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)) / _name(launch_id)
        path.touch(mode=0o600)
        path.write_text(json.dumps(dict(variables)), encoding="utf-8")
    except OSError as error:
        raise HvdtrainError(
            f"cannot keep secret variables in {parent}: {error.strerror or error}"
        ) from error
    return path


def delivered(launch_id: str, parent: Path = Path("/tmp")) -> dict[str, str]:
    """Return the variables that were delivered to this host for the launch; empty if there are none."""
    for path in _files(launch_id, parent):
        variables: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return variables
    return {}


def withdraw(launch_id: str, parent: Path = Path("/tmp")) -> None:
    """Remove the delivered file and its folder."""
    for path in _files(launch_id, parent):
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


def _files(launch_id: str, parent: Path) -> Iterator[Path]:
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_private(folder) and (path := folder / _name(launch_id)).is_file():
            yield path


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
