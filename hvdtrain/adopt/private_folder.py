"""A folder of its own for each rank but the first, in which a script finds the user's files and writes its own.

It holds the folders of the user's working folder again, copies of the small files, and links in place of the others.
Names made, replaced or removed in it change nothing of the user's; a file that is opened for writing through its link
becomes a copy first. So ranks that run the same script neither write the same file nor wait for each other. The same
goes for the script's folder.

The nearest folders above, to which `..` leads, hold links to what is in the user's; a link to a folder becomes a
private one when something in it is written, as far as Python and TensorFlow's Python functions write it. Other paths
are the user's on all ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
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
from hvdtrain.keras_internals.corrections import replaced
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.runtime import Rank

MOST_ENTRIES = 100_000
"""Files and folders below the working folder that a private one has; folders with more are links to the user's."""
MOST_ABOVE = 1000
"""Entries of a folder above the working folder; one with more, such as /tmp, has no links."""
LEVELS = 3
"""Number of the folders above that have links."""
_PREFIX = "hvdtrain-adopt-"
_LINKED = {".git", ".hvdtrain", ".venv", "__pycache__", "node_modules", "venv"}
"""Folders in which a training writes nothing."""
_CHANGES = {
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
}
"""Number of the paths among the arguments of Python's audit events, of which the folders change."""
_WRITING = os.O_WRONLY | os.O_RDWR
_WRITE_IN_C = (
    (saving_api, "save_model", "filepath", 1, False),
    (saving_api, "save_weights", "filepath", 1, False),
    (tf.io, "write_file", "filename", 0, False),
    (tf.data.Dataset, "cache", "filename", 1, False),
    (tf.summary, "create_file_writer", "logdir", 0, True),
    (tf.io.gfile, "makedirs", "path", 0, True),
    (file_io, "recursive_create_dir_v2", "path", 0, True),
)
"""Functions that write in C++, in which Python hears nothing: the name and place of the path, and whether it is a
folder, in which they make something."""


class PrivateFolder:
    """The folders in which a rank works.

    Args:
        places: The user's folder -> the one that this rank has instead; empty for the first rank, which works in the
            user's.
        top: The folder that holds all of this rank's, at the user's paths.
        first: Folders of the user's that this rank has even if there are more than MOST_ENTRIES.
        links: Another path of a user's folder -> that folder.
    """

    def __init__(
        self,
        places: Mapping[Path, Path],
        top: Path | None = None,
        first: Iterable[Path] = (),
        links: Mapping[Path, Path] | None = None,
    ) -> None:
        self._places = dict(places)
        self._above = {one for users in places for one in users.parents[:LEVELS]} if top else set()
        self._top = top
        self._busy = threading.local()
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
        with self._quietly():
            for folder in self._above:
                self._link_above(folder)
            for users, own in self._places.items():
                self._copies[users].remove_outdated()
                mirror(users, own, self._copies[users], self._first)
        # Rank 0 waits, so that what it writes next is not among it.
        any_rank(False, "adopted_folder")

    def _link_above(self, users: Path) -> None:
        assert self._top is not None
        found = _listed(users) or []
        for entry in found if len(found) <= MOST_ABOVE else ():
            own = f"{self._top}{entry.path}"
            if not os.path.lexists(own) and not entry.name.startswith(_PREFIX):
                Path(own).symlink_to(entry.path)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Ignore this thread's own file operations in this block: they are hvdtrain's, not the script's."""
        self._busy.is_set = True
        try:
            yield
        finally:
            self._busy.is_set = False

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
        if not self._is_scripts(path):
            return
        name = Path(os.fsdecode(path))
        with self._quietly():
            name = self._own_way(name.parent) / name.name
            if not name.is_symlink() or self._top not in name.parents:
                return
            users = name.resolve()
            name.unlink()
            if users.is_file():
                if truncated:
                    name.touch()
                else:
                    shutil.copyfile(users, name)

    def own_folder(self, path: Any) -> None:
        """Before something in the folder `path` is made, renamed or removed: let no link to the user's lead to it."""
        if self._is_scripts(path):
            with self._quietly():
                self._own_way(Path(os.fsdecode(path)))

    def _is_scripts(self, path: Any) -> bool:
        is_path = isinstance(path, str | bytes | os.PathLike)
        return bool(self._places) and is_path and not getattr(self._busy, "is_set", False)

    def _own_way(self, folder: Path) -> Path:
        """Resolve `folder`. Links to the user's folders on its path become private folders first."""
        place = Path.cwd()
        for part in folder.parts:
            place = place.parent if part == ".." else place / part
            if not place.is_symlink():
                continue
            target = place.resolve()
            if self._top not in place.parents or self._top in target.parents or not target.is_dir():
                place = target
            elif len(_listed(target) or ()) < MOST_ENTRIES:
                place.unlink()
                self._places[target], self._copies[target] = place, FileCopies(target)
                mirror(target, place, self._copies[target])
        return place


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
    # With the names of the user's folders and of those above, which a script may use.
    places = {one: top / one.relative_to("/") for one in roots}
    # The shell's name of the working folder, which may have links in it.
    shells = Path(os.environ.get("PWD", users))
    links = {shells: users} if shells.resolve() == users else {}
    folder = PrivateFolder(places, top, first, links)
    try:
        for own in places.values():
            own.parent.mkdir(parents=True, exist_ok=True)
        for own in places.values():
            own.mkdir(exist_ok=True)
        if script is not None and script.is_file():
            _copy_script(script.absolute(), folder)
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


def _copy_script(script: Path, folder: PrivateFolder) -> None:
    """Copy a script, so that the place of `__file__` without links is this rank's, as that of a link to it."""
    real = script.resolve()
    own, own_real = (Path(folder.own_path(str(one))) for one in (script, real))
    for one in (own, own_real):
        one.parent.mkdir(parents=True, exist_ok=True)
    if own_real != real:
        shutil.copy2(real, own_real)
        if not os.path.lexists(own):
            own.symlink_to(own_real)


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
        elif event in _CHANGES and watched:
            for path in arguments[: _CHANGES[event]]:
                folder.own_folder(Path(os.fsdecode(path)).parent)
        elif event == "shutil.rmtree" and watched:
            folder.own_folder(arguments[0])

    sys.addaudithook(opened)  # Hears Python's own functions, and stays until the process ends.
    prepare_saving()  # Which makes them follow a link before they write; those below come before it.
    with contextlib.ExitStack() as blocks:
        for owner, name, keyword, place, makes_folder in _WRITE_IN_C:
            tell = folder.own_folder if makes_folder else partial(folder.own_file, truncated=False)
            telling = _telling(tell, keyword, place)
            blocks.enter_context(replaced(owner, name, telling))
        for opens, mode in ((h5py.File, "r"), (file_io.FileIO, "r"), (tf.io.TFRecordWriter, "w")):
            blocks.enter_context(replaced(opens, "__init__", _owning(folder, mode)))
        try:
            yield
        finally:
            watched.clear()


def _telling(tell: Callable[[Any], None], keyword: str, place: int) -> Callable[..., Any]:
    """Return the replacement of a function that writes to a path, which it tells first."""

    def call(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell(args[place] if len(args) > place else kwargs.get(keyword))
        return write(*args, **kwargs)

    return call


def _owning(folder: PrivateFolder, default: str) -> Callable[..., None]:
    """Return the replacement of `__init__` of a class that opens a file in C++: (self, name, mode=default, ...)."""

    def opening(
        initialize: Callable[..., None], opened: Any, name: Any, *args: Any, **kwargs: Any
    ) -> None:
        given = [*args[:1], kwargs.get("mode"), default]
        mode = next(one for one in given if isinstance(one, str))
        if not mode.startswith("r") or "+" in mode:
            folder.own_file(name, mode.startswith("w"))
        initialize(opened, name, *args, **kwargs)

    return opening
