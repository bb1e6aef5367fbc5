"""A folder of its own for each rank but the first, in which a script finds the user's files and writes its own.

It holds the folders of the user's working folder again, copies of the small files, and links in place of the others.
Names made, replaced or removed in it change nothing of the user's; a file that is opened for writing through its link
becomes a copy first. So ranks that run the same script neither write the same file nor wait for each other. The same
goes for the script's folder. Other paths are the user's on all ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import tensorflow as tf
from keras.src.saving import saving_api
from tensorflow.python.lib.io import file_io

from hvdtrain.adopt.file_copies import FileCopies
from hvdtrain.adopt.fit_writes import OwnFiles, Paths, copy_written
from hvdtrain.adopt.listing_order import in_users_order
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.runtime import Rank

MOST_ENTRIES = 100_000
"""Files and folders below the working folder that a private one has; folders with more are links to the user's."""
_PREFIX = "hvdtrain-adopt-"
_LINKED = {".git", ".hvdtrain", ".venv", "__pycache__", "node_modules", "venv"}
"""Folders in which a training writes nothing."""
_WRITING = os.O_WRONLY | os.O_RDWR


class PrivateFolder:
    """The folders in which a rank works.

    Args:
        places: The user's folder -> the one that this rank has instead; empty for the first rank, which works in the
            user's.
        first: Folders of the user's that this rank has even if there are more than MOST_ENTRIES.
        links: Another path of a user's folder -> that folder.
    """

    def __init__(
        self,
        places: Mapping[Path, Path],
        first: Iterable[Path] = (),
        links: Mapping[Path, Path] | None = None,
    ) -> None:
        self._places = places
        self._first = tuple(first)
        self._links = links or {}
        self._copies = {users: FileCopies(users) for users in places}

    def before_fit(self) -> OwnFiles:
        """Return the files of this rank's own, for `after_fit`."""
        return OwnFiles(self._places)

    def after_fit(self, before: OwnFiles, paths: Paths) -> None:
        """Show what rank 0 has written in a fit. A collective.

        Args:
            before: From `before_fit`, before rank 0 began.
            paths: Where the callbacks of this rank would have written, from `written_paths`.
        """
        own, users = paths, [{n: self._users_path(p) for n, p in one.items()} for one in paths]
        first = ALL_RANKS.exchange(users, "adopted_paths")[0]
        before.remove_overwritten()
        for callbacks in zip(first, users, own, strict=False) if self._places else ():
            for name in set.intersection(*map(set, callbacks)):
                copy_written(*(paths[name] for paths in callbacks))
        self.refresh()

    def refresh(self) -> None:
        """Show what rank 0 has written so far. A collective."""
        for users, own in self._places.items():
            self._copies[users].remove_outdated()
            mirror(users, own, self._copies[users], self._first)
        # Rank 0 waits, so that what it writes next is not among it.
        any_rank(False, "adopted_folder")

    def own_path(self, text: str) -> str:
        """Return a command-line argument with this rank's folder in place of the user's: `--out=/home/me/project/x`."""
        for users, own in [*self._links.items(), *self._places.items()]:
            prefix = str(users).rstrip("/")  # "" for the root folder
            pattern = rf"(?<![\w.:/-]){re.escape(prefix)}(?=/{'|$' if prefix else ''})"
            text = str(own).join(re.split(pattern, text))
        return text

    def _users_path(self, path: str) -> str:
        """Return an absolute path with the user's folder in place of this rank's."""
        for users, own in self._places.items():
            if Path(path).is_relative_to(own):
                return str(users / Path(path).relative_to(own))
        return path

    def own_file(self, path: Any, truncated: bool) -> None:
        """Before `path` is opened for writing: put a file of this rank's own in place of a link to the user's.

        Args:
            path: What is opened; anything but a link in this folder stays as it is.
            truncated: Whether its contents will be dropped.
        """
        if not self._places or not isinstance(path, str | bytes | os.PathLike):
            return
        name = Path(os.fsdecode(path))
        name = name.parent.resolve() / name.name
        if not name.is_symlink() or not any(own in name.parents for own in self._places.values()):
            return
        users = name.resolve()
        name.unlink()
        if users.is_file():
            if truncated:
                name.touch()
            else:
                shutil.copyfile(users, name)


@contextlib.contextmanager
def private_folder(rank: Rank, script: Path | None = None) -> Iterator[PrivateFolder]:
    """Yield the folder of `rank`, in which this process works in this block, and remove it afterwards.

    A collective: every rank begins with the files that were there before.

    Args:
        rank: This rank.
        script: What it runs. Scripts also write beside themselves, where that is outside of the working folder.
    """
    if rank.is_first:
        folder = PrivateFolder({})
        folder.refresh()
        yield folder
        return
    users = Path.cwd()
    first = {users, (script or users / "script").resolve().parent}
    roots = sorted(one for one in first if first.isdisjoint(one.parents))
    top, lock = _locked_folder()
    process = os.getpid()
    # With the names of the user's folders, which a script may use.
    places = {one: top / str(number) / one.name for number, one in enumerate(roots)}
    # The shell's name of the working folder, which may have links in it.
    shells = Path(os.environ.get("PWD", users))
    links = {shells: users} if shells.resolve() == users else {}
    folder = PrivateFolder(places, first, links)
    try:
        for own in places.values():
            own.parent.mkdir(exist_ok=True)
        folder.refresh()
        here = folder.own_path(str(users))
        os.chdir(here)
        with contextlib.ExitStack() as blocks:
            blocks.enter_context(mock.patch.dict(os.environ, PWD=here))
            blocks.enter_context(_watching(folder))
            for one, own in places.items():
                blocks.enter_context(in_users_order(one, own))
            yield folder
    finally:
        if os.getpid() == process:  # Not in one that the script has forked, and that ends first.
            os.chdir(users)
            shutil.rmtree(top, ignore_errors=True)
            os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder, and a file descriptor that locks it; remove those of ranks that were killed."""
    place = Path(tempfile.gettempdir()).resolve()
    for old in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # Another rank removes it, or it is another user's.
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)
    # Nobody sees it under its name before it is locked.
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # Of a file system without locks, nothing is removed.
        fcntl.flock(lock, fcntl.LOCK_EX)
    return new.rename(place / new.name[1:]), lock


def mirror(users: Path, own: Path, copies: FileCopies, first: Iterable[Path] = ()) -> None:
    """Make the folders below `users` below `own` too, with copies of or links to the files, unless something is there.

    Breadth first, but with those on the way to `first` before the others, up to MOST_ENTRIES; a folder that has too
    many, or that this process may not list, becomes a link.
    """
    inside = [one.relative_to(users) for one in first if one.is_relative_to(users)]
    waiting = deque([Path(), *(way for one in inside for way in (*reversed(one.parents), one))])
    seen, entries = set[Path](), 0
    while waiting:
        folder = waiting.popleft()
        if folder in seen:
            continue
        seen.add(folder)
        here, there = own / folder, users / folder
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            continue
        found = _listed(there)
        if not here.exists() and (found is None or entries + len(found) > MOST_ENTRIES):
            here.symlink_to(there)
            continue
        here.mkdir(exist_ok=True)
        entries += len(found or ())
        for entry in found or ():
            if entry.name.startswith(_PREFIX):
                continue  # Private folders, if they are made inside the user's.
            if entry.is_dir(follow_symlinks=False) and entry.name not in _LINKED:
                waiting.append(folder / entry.name)
            else:
                _show(entry.path, f"{here}/{entry.name}", copies)


def _show(users: str, own: str, copies: FileCopies) -> None:
    """Make a copy of the user's file or a link to it, unless something is there."""
    if not os.path.lexists(own) and not copies.make(users, own):
        Path(own).symlink_to(users)


def _listed(folder: Path) -> list[os.DirEntry[str]] | None:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return None


@contextlib.contextmanager
def _watching(folder: PrivateFolder) -> Iterator[None]:
    """Call `folder.own_file` before a file is opened for writing in this block."""
    watched = [True]

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and watched:
            path, _, flags = arguments
            if flags is not None and flags & _WRITING and not flags & os.O_EXCL:
                folder.own_file(path, bool(flags & os.O_TRUNC))
        elif event in ("os.truncate", "sqlite3.connect") and watched:
            folder.own_file(arguments[0], truncated=False)

    sys.addaudithook(opened)  # Hears Python's own functions, and stays until the process ends.
    prepare_saving()  # Which makes them follow a link before they write; those below come before it.
    with (
        mock.patch.object(saving_api, "save_model", _saving(saving_api.save_model, folder)),
        mock.patch.object(saving_api, "save_weights", _saving(saving_api.save_weights, folder)),
        mock.patch.object(h5py.File, "__init__", _owning(h5py.File.__init__, folder, "r")),
        mock.patch.object(
            file_io.FileIO, "__init__", _owning(file_io.FileIO.__init__, folder, "r")
        ),
        mock.patch.object(
            tf.io.TFRecordWriter, "__init__", _owning(tf.io.TFRecordWriter.__init__, folder, "w")
        ),
    ):
        try:
            yield
        finally:
            watched.clear()


def _saving(save: Callable[..., Any], folder: PrivateFolder) -> Callable[..., Any]:
    """Return a function of Keras that saves a model: (model, filepath, ...)."""

    @functools.wraps(save)
    def call(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        folder.own_file(filepath, truncated=False)
        return save(model, filepath, *args, **kwargs)

    return call


def _owning(
    initialize: Callable[..., None], folder: PrivateFolder, default: str
) -> Callable[..., None]:
    """Return the `__init__` of a class that opens a file in C++: (self, name, mode=default, ...)."""

    @functools.wraps(initialize)
    def opening(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        given = [*args[:1], kwargs.get("mode"), default]
        mode = next(one for one in given if isinstance(one, str))
        if not mode.startswith("r") or "+" in mode:
            folder.own_file(name, mode.startswith("w"))
        initialize(self, name, *args, **kwargs)

    return opening
