# ruff: noqa: PTH207, PTH208 (the functions that scripts call)
"""The private folder of a rank lists files in the user's order, whatever its own file system."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvdtrain.adopt.listing_order import in_users_order

FILES = ["b/2", "a/1", "b/1", "c", "a/2", "d"]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Both folders hold the same files, and a file system that lists them backwards in the user's folder only."""
    users, own = tmp_path / "users", tmp_path / "own"
    for folder in (users, own):
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    (own / "new").touch()
    monkeypatch.chdir(own)
    listdir = os.listdir

    def listed(path: Any = ".") -> list[str]:
        return sorted(listdir(path), reverse=str(path).startswith(str(users)))

    monkeypatch.setattr(os, "listdir", listed)
    with in_users_order(users, own):
        yield users


def walked() -> list[str]:
    return [str(Path(at, name)) for at, _, names in os.walk("b") for name in names]


LISTINGS = {
    "listdir": (lambda: os.listdir("."), ["d", "c", "b", "a", "new"]),
    "listdir of bytes": (lambda: os.listdir(b"a"), [b"2", b"1"]),
    "listdir without a folder": (lambda: os.listdir(), ["d", "c", "b", "a", "new"]),
    "scandir": (lambda: [one.name for one in os.scandir("a")], ["2", "1"]),
    "walk": (walked, ["b/2", "b/1"]),
    "glob": (lambda: glob.glob("*/*"), ["b/2", "b/1", "a/2", "a/1"]),
    "iterdir": (lambda: [one.name for one in Path("a").resolve().iterdir()], ["2", "1"]),
    "gfile.listdir": (lambda: tf.io.gfile.listdir("a"), ["2", "1"]),
    "gfile.glob": (lambda: tf.io.gfile.glob("*/*"), ["./b/2", "./b/1", "./a/2", "./a/1"]),
    "gfile.glob of all": (lambda: tf.io.gfile.glob("*"), ["./d", "./c", "./b", "./a", "./new"]),
}


@pytest.mark.parametrize(("found", "wanted"), LISTINGS.values(), ids=LISTINGS)
def test_the_order_is_the_users(users: Path, found: Callable[[], list], wanted: list) -> None:
    assert found() == wanted


def test_other_folders_are_as_they_are(users: Path) -> None:
    apart = users.parent / "apart"
    for name in ("x/1", "y", "z"):
        (apart / name).parent.mkdir(parents=True, exist_ok=True)
        (apart / name).touch()
    with os.scandir(apart) as entries:
        assert {one.name for one in entries} == {"x", "y", "z"}
    descriptor = os.open(apart, os.O_RDONLY)
    assert sorted(os.listdir(descriptor)) == ["x", "y", "z"]
    os.close(descriptor)
    (users.parent / "own" / "link").symlink_to(apart)
    assert sorted(os.listdir("link")) == ["x", "y", "z"]
    assert sorted(tf.io.gfile.glob(f"{apart}/*")) == [str(apart / name) for name in "xyz"]


def test_a_missing_folder_is_an_error(users: Path) -> None:
    with pytest.raises(FileNotFoundError):
        os.listdir("missing")
    with pytest.raises(FileNotFoundError):
        os.scandir("missing")
