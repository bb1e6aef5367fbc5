"""The files in a private folder are listed in the order of the user's file system.

os.listdir, os.scandir and what builds on them (os.walk, glob, pathlib, tf.io.gfile) return names in an order that
depends on the file system. A script that reads its files in this order would read other examples on a rank whose
private folder is on another file system.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tensorflow.python.lib.io import file_io

_LAST = 1 << 32


@contextlib.contextmanager
def in_users_order(users: Path, own: Path) -> Iterator[None]:
    """Within this block, list folders in `own` in the order of those in `users`; names that are not there come last.

    Args:
        users: The user's working folder.
        own: The folder in which this rank works instead.
    """
    order = _Order(users, own, os.listdir)
    native = file_io._pywrap_file_io
    with (
        mock.patch.object(os, "listdir", order.of_names(os.listdir)),
        mock.patch.object(os, "scandir", order.of_entries(os.scandir)),
        mock.patch.object(native, "GetChildren", order.of_names(native.GetChildren)),
        mock.patch.object(native, "GetMatchingFiles", order.of_paths(native.GetMatchingFiles)),
    ):
        yield


class _Order:
    """The order of the names in the user's folders.

    Args:
        users: The user's working folder.
        own: The private folder.
        listdir: os.listdir as it was.
    """

    def __init__(self, users: Path, own: Path, listdir: Callable[[Path], list[str]]) -> None:
        self._users = users
        self._own = own
        self._listdir = listdir

    def of_names(self, function: Callable[..., Iterable[Any]]) -> Callable[..., list[Any]]:
        """Return a function like os.listdir."""

        @functools.wraps(function)
        def call(folder: Any = ".") -> list[Any]:
            return self._sorted(folder, function(folder), os.fsdecode)

        return call

    def of_entries(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like os.scandir."""

        @functools.wraps(function)
        def call(folder: Any = ".") -> _Entries:
            with function(folder) as found:
                return _Entries(self._sorted(folder, found, lambda entry: os.fsdecode(entry.name)))

        return call

    def of_paths(self, function: Callable[..., Iterable[Any]]) -> Callable[..., list[Any]]:
        """Return a function that returns the paths that match a pattern."""

        @functools.wraps(function)
        def call(pattern: Any) -> list[Any]:
            in_folder, resolved = functools.cache(self._positions), functools.cache(Path.resolve)

            def place(path: Any) -> list[int]:
                given = Path(os.fsdecode(path))
                absolute = resolved(given.parent) / given.name
                if self._own not in absolute.parents:
                    return []
                inside = absolute.relative_to(self._own)
                steps = [*reversed(inside.parents[:-1]), inside]
                return [in_folder(self._own / step.parent).get(step.name, _LAST) for step in steps]

            return sorted(function(pattern), key=place)

        return call

    def _sorted(self, folder: Any, found: Iterable[Any], name: Callable[[Any], str]) -> list[Any]:
        if isinstance(folder, int):  # A file descriptor, as shutil.rmtree uses.
            return list(found)
        positions = self._positions(Path(os.fsdecode(folder or ".")).resolve())
        return sorted(found, key=lambda one: positions.get(name(one), _LAST))

    def _positions(self, folder: Path) -> dict[str, int]:
        """Return the position of each name in the user's folder in place of which this one is."""
        if folder != self._own and self._own not in folder.parents:
            return {}
        try:
            names = self._listdir(self._users / folder.relative_to(self._own))
        except OSError:
            return {}
        return {name: position for position, name in enumerate(names)}


class _Entries:
    """What os.scandir returns: an iterator that is also a context."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._rest = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._rest)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._rest = iter(())
