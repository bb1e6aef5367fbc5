"""What rank 0 alone writes in a fit, the files of Keras's callbacks, where the other ranks look for them afterwards.

A rank that has written such a file itself before the fit has its own in place of the user's; and a path may hold the
time, or a name that `tempfile` has drawn on each rank.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.adopt.file_copies import version_of
from hvdtrain.keras.writers import WRITERS

Paths = list[dict[str, str]]
"""Name of an attribute -> absolute path, for each callback that writes."""


class OwnFiles:
    """The files in the private folders of a rank that are no links, as they are before a fit.

    Args:
        places: The user's folder -> the one that this rank has instead.
    """

    def __init__(self, places: Mapping[Path, Path]) -> None:
        pairs = [(own, users) for one, place in places.items() for own, users in _files(place, one)]
        self._before = {own: (users, version_of(users), version_of(own)) for own, users in pairs}

    def remove_overwritten(self) -> None:
        """Remove those that rank 0 has written, or removed, since, and this rank has not."""
        for own, (users, users_before, own_before) in self._before.items():
            if version_of(users) != users_before and version_of(own) == own_before:
                Path(own).unlink()


def _files(place: Path, users: Path) -> Iterable[tuple[str, str]]:
    waiting = [str(place)]
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path, f"{users}{entry.path[len(str(place)) :]}"


def written_paths(callbacks: Sequence[Any]) -> Paths:
    """Return the paths that callbacks hold in attributes, for those that only rank 0 runs."""
    return [
        {
            name: os.path.abspath(value)  # noqa: PTH100 - a link stays one, and ".." goes
            for name, value in vars(callback).items()
            if isinstance(value, str | os.PathLike)
        }
        for callback in callbacks
        if isinstance(callback, WRITERS)
    ]


def copy_written(first: str, users: str, own: str) -> None:
    """Copy what rank 0 wrote to a path to where this rank looks for it, if that has another name.

    Args:
        first: Path of rank 0, in which braces hold what Keras fills in, such as the epoch.
        users: Path of this rank, with the user's folders in place of its own.
        own: The same with its own folders.
    """
    beginning, brace, rest = first.partition("{")
    if first == users or users.partition("{")[1:] != (brace, rest):
        return
    target = own.partition("{")[0]
    for found in glob.glob(f"{glob.escape(beginning)}*"):  # noqa: PTH207 - a beginning, not a folder
        place = Path(target + found[len(beginning) :])
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(found).is_dir():
            shutil.copytree(found, place, dirs_exist_ok=True)
        else:
            shutil.copyfile(found, place)
