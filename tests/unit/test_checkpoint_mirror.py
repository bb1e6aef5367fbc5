"""Copies of checkpoints in another storage: complete or absent, and enough to continue on a new machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from test_damaged_run import train

from hvdtrain import Checkpoints, UsageError
from hvdtrain.checkpoint.folder import Checkpoint, load, newest, numbered, save
from hvdtrain.checkpoint.lock import lock_folder
from hvdtrain.checkpoint.mirror import Mirror, MirrorError


@pytest.fixture
def url() -> str:
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def saved(folder: Path, number: int) -> Path:
    folder.mkdir(exist_ok=True)
    content = Checkpoint({"step": number}, {"w": np.full(3, number, np.float32)}, [number])
    return save(folder, number, content, keep=9)


def fetched(url: str, folder: Path) -> int | None:
    """The step of the checkpoint that a new machine would continue from."""
    folder.mkdir(exist_ok=True)
    found = newest(folder)
    if Mirror(url, keep=2).fetch(folder, -1 if found is None else found.facts["step"]):
        found = newest(folder)
    return None if found is None else found.facts["step"]


def test_the_newest_comes_back_and_old_ones_go(url: str, tmp_path: Path) -> None:
    assert fetched(url, tmp_path / "empty") is None
    mirror = Mirror(url, keep=2)
    for number in (5, 10, 15):
        mirror.copy(saved(tmp_path / "here", number))
    assert sorted(path[-2:] for path in fsspec.filesystem("memory").ls("/bucket/run", False)) == [
        "10",
        "15",
    ]
    assert fetched(url, tmp_path / "new") == 15
    saved(tmp_path / "newer", 20)
    assert fetched(url, tmp_path / "newer") == 20, "nothing newer is there"
    assert [path.name[-2:] for path in numbered(tmp_path / "newer")] == ["20"]


def test_what_is_left_of_a_copy_that_failed_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(f"file://{tmp_path}/there", keep=2)

    def full(here: str, there: str) -> None:
        Path(there).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(MirrorError, match="No space left"):
        patched.setattr(mirror._storage, "put_file", full)
        mirror.copy(saved(tmp_path / "here", 5))
    mirror.copy(saved(tmp_path / "here", 10))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["step-000000010"]


def test_a_damaged_copy_is_passed_over(url: str, tmp_path: Path) -> None:
    mirror = Mirror(url, keep=2)
    for number in (5, 10):
        mirror.copy(saved(tmp_path / "here", number))
    path = "/bucket/run/step-000000010"
    fsspec.filesystem("memory").pipe_file(path, b"damaged")
    with pytest.warns(UserWarning, match=rf"'step-000000010' in '{url}' is damaged"):
        assert fetched(url, tmp_path / "new") == 5


def test_a_damaged_checkpoint_here_is_replaced_by_the_copy(url: str, tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "run", Checkpoints(mirror=url), epochs=3)[0]
    path = tmp_path / "run" / "checkpoints" / "step-000000012"
    path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="step-000000012.* is damaged") as warned:
        again = train(tmp_path / "run", Checkpoints(mirror=url), epochs=3)[0]
    assert sum("damaged" in str(one.message) for one in warned) == 1, (
        "and none says that the one before is used"
    )
    for one, same in zip(undisturbed, again, strict=True):
        np.testing.assert_array_equal(one, same)
    load(path)


def test_nothing_is_fetched_into_the_folder_of_a_run_that_trains(url: str, tmp_path: Path) -> None:
    Mirror(url, keep=2).copy(saved(tmp_path / "here", 5))
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    lock = lock_folder(folder, "run")
    with pytest.raises(UsageError, match="is in use by process"):
        train(tmp_path / "run", Checkpoints(mirror=url))
    os.close(lock)
    assert [path.name for path in folder.iterdir()] == ["lock"]


class Lost(Exception):
    """The connection, or the machine."""


def test_every_operation_may_be_the_last(url: str, tmp_path: Path) -> None:
    """A copy over an older one of the same name, beside two others: what comes back is whole, and as new as before."""
    results = []
    for most in range(100):
        fsspec.filesystem("memory").store.clear()
        mirror = Mirror(url, keep=2)
        for number in (5, 10):
            mirror.copy(saved(tmp_path / f"here{most}", number))
        mirror._storage = Failing(mirror._storage, most)
        try:
            mirror.copy(saved(tmp_path / f"here{most}", 15))
        except MirrorError as error:
            assert str(error) == "Lost: connection"
        results.append(fetched(url, tmp_path / f"new{most}"))
        if mirror._storage.left >= 0:
            break
    assert results[0] == 10 and results[-1] == 15
    assert results == sorted(results) and set(results) == {10, 15}


class Failing:
    """A storage that is lost after some operations that change it."""

    def __init__(self, storage: Any, most: int) -> None:
        self.storage, self.left = storage, most

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.storage, name)
        return self.counted(method) if name in ("put_file", "mv", "rm_file", "makedirs") else method

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Lost("connection")
            return method(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket", "Protocol not known"),
        ("s3://me:hunter2@bucket/run", "contains a user name or password"),
    ],
)
def test_what_cannot_be_a_mirror(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        Mirror(url, keep=2)
    assert "hunter2" not in str(error.value)


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"pip install 'hvdtrain\[cloud\]'"):
        Mirror("memory://run", keep=2)


@pytest.mark.slow
def test_a_run_continues_on_a_new_machine(url: str, tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", epochs=4)[0]
    mirrored = Checkpoints(mirror=url)
    train(tmp_path / "lost", mirrored, epochs=2)
    for one, same in zip(undisturbed, train(tmp_path / "new", mirrored, epochs=4)[0], strict=True):
        np.testing.assert_array_equal(one, same)
    assert [path.name[-2:] for path in numbered(tmp_path / "new" / "checkpoints")] == ["16", "12"]


def test_a_mirror_that_fails_is_warned_of_and_the_training_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(self: Mirror, checkpoint: Path) -> None:
        raise MirrorError("no connection")

    monkeypatch.setattr(Mirror, "copy", copy)
    with pytest.warns(UserWarning, match=rf"step 4 could not be copied to '{url}': no conn"):
        train(tmp_path, Checkpoints(mirror=url), epochs=1)
    assert [path.name[-1] for path in numbered(tmp_path / "checkpoints")] == ["4"]
