"""Values that must not stand in a command line, brought to the ranks of another host in a file.

The file lies in a folder that only this user can enter, and lives as long as the launch. Over Gloo
a rank on another host is started by an ssh command that carries its variables, which everybody on
both hosts can read; over MPI, and on the launcher's own host, variables travel out of sight.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import HvdtrainError


def deliver(launch_id: str, variables: Mapping[str, str], parent: Path = Path("/tmp")) -> Path:
    """Write the variables for the launch's ranks on this host. Raises HvdtrainError."""
    folder = _folder(parent)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder)
        path = folder / _name(launch_id)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(dict(variables), file)
    except OSError as error:
        raise HvdtrainError(
            f"cannot keep secret variables in {folder}: {error.strerror or error}"
        ) from error
    return path


def delivered(launch_id: str, parent: Path = Path("/tmp")) -> dict[str, str]:
    """The variables that were delivered for the launch on this host; none if there is no file.

    Raises HvdtrainError if the folder is not this user's own, so that nobody else can bring any.
    """
    folder = _folder(parent)
    path = folder / _name(launch_id)
    if not path.exists():
        return {}
    _check(folder)
    variables: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return variables


def withdraw(launch_id: str, parent: Path = Path("/tmp")) -> None:
    """Remove what was delivered, and the folder with the last of it."""
    folder = _folder(parent)
    with contextlib.suppress(OSError):
        (folder / _name(launch_id)).unlink(missing_ok=True)
        folder.rmdir()


def _folder(parent: Path) -> Path:
    return parent / f"hvdtrain-{os.getuid()}"


def _name(launch_id: str) -> str:
    # Hosts may share the folder.
    return f"{launch_id}.{platform.node()}.json".replace(os.sep, "_")


def _check(folder: Path) -> None:
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not private or stat.S_IMODE(found.st_mode) & 0o077:
        raise HvdtrainError(
            f"{folder} is not a private folder of this user (mode 700): remove it and try again"
        )
