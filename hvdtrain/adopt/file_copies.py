"""Copies of the user's small files in the private folder of a rank.

A link would show a rank what rank 0 has just written, where the rank is still to read what was there before: a counter
that a script reads and writes, a log, a table of results.
"""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

LARGEST = 1 << 20
"""Bytes of the largest file that is copied."""
ROOM = 16 << 20
"""Bytes of all copies of a rank."""
MOST = 1000
"""Number of copies; those nearest to the user's folder come first. More files are data, which scripts only read."""
_ALWAYS = (".index", ".pb")
"""Suffixes of what TensorFlow writes anew in C++ and through links: a checkpoint's table of contents, a SavedModel."""

_Version = tuple[int, int, int]


@dataclass(frozen=True)
class _Copied:
    users: str
    users_version: _Version | None
    own_version: _Version | None


class FileCopies:
    """The copies that a rank has, which are brought up to date until it writes them itself.

    Args:
        root: The user's folder. Files of other file systems below it are not copied, as those of /proc may never end;
            nor are hidden ones, which hold settings and credentials.
    """

    def __init__(self, root: Path) -> None:
        self._prefix = len(str(root).rstrip("/"))
        self._device = root.stat().st_dev
        self._copied: dict[str, _Copied] = {}
        self._room = ROOM

    def make(self, users: str, own: str) -> bool:
        """Copy the user's file to `own`, which does not exist, if it is small; return whether this was done."""
        always = users.endswith(_ALWAYS)
        if not always and (len(self._copied) >= MOST or "/." in users[self._prefix :]):
            return False
        try:
            found = Path(users).stat()
            if not stat.S_ISREG(found.st_mode) or found.st_dev != self._device:
                return False
            if not always and found.st_size > min(LARGEST, self._room):
                return False
            shutil.copy2(users, own)
        except OSError:
            Path(own).unlink(missing_ok=True)
            return False
        self._room -= found.st_size
        self._copied[own] = _Copied(users, version_of(users), version_of(own))
        return True

    def remove_outdated(self) -> None:
        """Remove the copies of files that are no longer what they were, except those that this rank has written."""
        for own, copied in list(self._copied.items()):
            if version_of(own) != copied.own_version:
                del self._copied[own]
            elif version_of(copied.users) != copied.users_version:
                del self._copied[own]
                Path(own).unlink()


def version_of(path: str) -> _Version | None:
    """Return what differs after any write to a file; None if there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
