"""Copies of the user's small files in the private folder of a rank.

A link would show a rank what rank 0 has just written, where the rank is still to read what was there before: a counter
that a script reads and writes, a log, a table of results.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

LARGEST = 1 << 20
"""Bytes of the largest file that is copied."""
ROOM = 64 << 20
"""Bytes of all copies of a rank."""
_ALWAYS = {".index", ".pb"}
"""Suffixes of what TensorFlow writes anew in C++ and through links: a checkpoint's table of contents, a SavedModel."""

_Version = tuple[int, int, int]


@dataclass(frozen=True)
class _Copied:
    users: Path
    users_version: _Version | None
    own_version: _Version | None


class FileCopies:
    """The copies that a rank has, which are brought up to date until it writes them itself.

    Args:
        root: The user's folder. Files of other file systems below it are not copied, as those of /proc may never end;
            nor are hidden ones, which hold settings and credentials.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._device = root.stat().st_dev
        self._copied: dict[Path, _Copied] = {}
        self._room = ROOM

    def make(self, users: Path, own: Path) -> bool:
        """Copy the user's file to `own`, which does not exist, if it is small; return whether this was done."""
        try:
            found = users.stat()
            if not self._is_to_copy(users, found):
                return False
            shutil.copy2(users, own)
        except OSError:
            own.unlink(missing_ok=True)
            return False
        self._room -= found.st_size
        self._copied[own] = _Copied(users, _version(users), _version(own))
        return True

    def _is_to_copy(self, users: Path, found: os.stat_result) -> bool:
        if not stat.S_ISREG(found.st_mode) or found.st_dev != self._device:
            return False
        if users.suffix in _ALWAYS:
            return True
        hidden = any(part.startswith(".") for part in users.relative_to(self._root).parts)
        return not hidden and found.st_size <= min(LARGEST, self._room)

    def remove_outdated(self) -> None:
        """Remove the copies of files that are no longer what they were, except those that this rank has written."""
        for own, copied in list(self._copied.items()):
            if _version(own) != copied.own_version:
                del self._copied[own]
            elif _version(copied.users) != copied.users_version:
                del self._copied[own]
                own.unlink()


def _version(path: Path) -> _Version | None:
    """Return what differs after any write to a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
