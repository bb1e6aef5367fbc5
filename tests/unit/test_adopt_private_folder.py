"""The folder in which a rank other than the first runs an adopted script: it reads the user's files, writes its own."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.adopt.file_copies import FileCopies
from hvdtrain.adopt.private_folder import MOST_ENTRIES, PrivateFolder, mirror, private_folder
from hvdtrain.runtime import Rank, init

SECOND = Rank(1, 2, 1, 2)
NUMBERS = np.arange(10.0)[:, None]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user's"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "deep" / "table.csv").write_text("a,b\n")
    (folder / "log.txt").write_text("first\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(params=["copies", "links"])
def private(
    users: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PrivateFolder]:
    if request.param == "links":
        monkeypatch.setattr("hvdtrain.adopt.file_copies.LARGEST", -1)
    init()
    with private_folder(SECOND) as folder:
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_and_contents() -> tuple[list[Path], dict[str, bytes]]:
    return sorted(Path().rglob("*")), contents(Path())


def test_a_rank_reads_the_users_files(users: Path, private: PrivateFolder) -> None:
    assert Path.cwd() != users
    assert contents(Path.cwd()) == contents(users)
    assert Path("data/deep/table.csv").read_text() == "a,b\n"


def test_a_rank_lists_files_in_the_users_order(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system; /dev/shm lists the newest file first."""
    for number in np.random.default_rng(0).permutation(99):
        (users / str(number)).touch()
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    wanted = os.listdir()  # noqa: PTH208
    init()
    with private_folder(SECOND):
        assert os.listdir() == wanted  # noqa: PTH208


def opened(mode: str) -> None:
    with Path("log.txt").open(mode) as file:
        file.write("more")


def os_opened(flags: int) -> None:
    with os.fdopen(os.open("log.txt", flags), "wb") as file:
        file.write(b"x")


WRITES = {
    "write": lambda: Path("log.txt").write_text("mine"),
    "append": lambda: opened("a"),
    "update": lambda: opened("r+"),
    "os.open": lambda: os_opened(os.O_WRONLY),
    "os.open, emptied": lambda: os_opened(os.O_WRONLY | os.O_TRUNC),
    "os.truncate": lambda: os.truncate("log.txt", 2),
    "np.save": lambda: np.savez("log.txt", NUMBERS),
    "remove": lambda: Path("log.txt").unlink(),
    "replace": lambda: Path("new").write_text("x") and Path("new").replace("log.txt"),
    "h5py": lambda: h5py.File("log.txt", "w").close(),
    "gfile": lambda: (
        tf.io.write_file("other", "x") and tf.io.gfile.GFile("log.txt", "w").write("y")
    ),
    "TFRecord": lambda: tf.io.TFRecordWriter("log.txt").close(),
    "mkdir": lambda: Path("out").mkdir(),
    "in a folder": lambda: Path("data/deep/new.csv").write_text("x"),
    "through a parent": lambda: Path("data/../log.txt").write_text("mine"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_a_rank_writes_is_its_own(users: Path, private: PrivateFolder, write: Any) -> None:
    before, names = contents(users), sorted(users.rglob("*"))
    own = names_and_contents()
    write()
    assert contents(users) == before and sorted(users.rglob("*")) == names
    assert names_and_contents() != own


def test_a_file_that_is_appended_to_keeps_its_lines(users: Path, private: PrivateFolder) -> None:
    with Path("log.txt").open("a") as file:
        file.write("second\n")
    assert Path("log.txt").read_text() == "first\nsecond\n"


def test_a_file_that_exists_is_not_created(users: Path, private: PrivateFolder) -> None:
    with pytest.raises(FileExistsError):
        opened("x")
    assert Path("log.txt").read_text() == "first\n"


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_a_model_that_is_saved_again(users: Path, private: PrivateFolder, name: str) -> None:
    """hvdtrain writes it beside the file that a link points to."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    save = model.save_weights if "weights" in name else model.save
    (users / name).write_text("of an earlier run")
    private.refresh()
    save(name)
    assert (users / name).read_text() == "of an earlier run"
    assert Path(name).stat().st_size > 1000 and not Path(name).is_symlink()
    assert not [*users.glob(".tmp*")]


def test_a_checkpoint_that_is_written_again(users: Path, private: PrivateFolder) -> None:
    for value, folder in ((1.0, users), (2.0, Path())):
        tf.train.Checkpoint(v=tf.Variable(value)).write(str(folder / "ckpt"))
        tf.saved_model.save(tf.Module(), str(folder / "exported"))
        private.refresh()
    for value, folder in ((1.0, users), (2.0, Path())):
        found = tf.train.load_checkpoint(str(folder / "ckpt"))
        assert found.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE") == value
    assert not [path for path in Path("exported").rglob("*.pb") if path.is_symlink()]


def test_a_database_of_a_rank_is_its_own(users: Path, private: PrivateFolder) -> None:
    with contextlib.closing(sqlite3.connect(users / "runs.db")) as runs:
        runs.execute("create table runs (loss real)")
    private.refresh()
    with contextlib.closing(sqlite3.connect("runs.db")) as runs:
        runs.execute("insert into runs values (0.5)")
        runs.commit()
        assert runs.execute("select * from runs").fetchall() == [(0.5,)]
    with contextlib.closing(sqlite3.connect(users / "runs.db")) as runs:
        assert not runs.execute("select * from runs").fetchall()


def test_a_file_of_a_linked_h5_is_read_through_the_link(
    users: Path, private: PrivateFolder
) -> None:
    large = np.arange(2e5)
    with h5py.File(users / "a.h5", "w") as file:
        file["x"] = large
    private.refresh()
    with h5py.File("a.h5") as file:
        assert np.array_equal(file["x"], large)
    assert Path("a.h5").is_symlink()


def test_refresh_shows_what_rank_0_wrote_and_keeps_what_this_rank_wrote(
    users: Path, private: PrivateFolder
) -> None:
    Path("log.txt").write_text("mine")
    Path("best").write_text("a file here")
    (users / "checkpoints").mkdir()
    (users / "checkpoints" / "best.keras").write_text("model")
    (users / "best").mkdir()
    (users / "best" / "x").write_text("a folder there")
    private.refresh()
    assert Path("checkpoints/best.keras").read_text() == "model"
    assert (Path("log.txt").read_text(), Path("best").read_text()) == ("mine", "a file here")


def test_a_private_folder_ends_with_its_block(users: Path) -> None:
    with private_folder(SECOND):
        own = Path.cwd()
        Path("x").write_text("x")
    assert not own.exists() and Path.cwd() == users
    assert set(contents(users)) == {"log.txt", "data/deep/table.csv"}


def test_a_process_that_the_script_forks_does_not_remove_the_folder(users: Path) -> None:
    init()
    with contextlib.ExitStack() as blocks:
        blocks.enter_context(private_folder(SECOND))
        child = os.fork()
        if child == 0:
            blocks.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert Path("data/deep/table.csv").is_file()


def test_the_folder_of_a_rank_that_was_killed_is_removed(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    init()
    (tmp_path / "hvdtrain-adopt-killed" / "data").mkdir(parents=True)
    with private_folder(SECOND):
        first = top_of(Path.cwd())
        os.chdir(users)
        with private_folder(Rank(2, 3, 2, 3)):
            second = top_of(Path.cwd())
            assert {*tmp_path.glob("*hvdtrain-adopt-*")} == {first, second}
    assert not [*tmp_path.glob("*hvdtrain-adopt-*")]


def test_the_first_rank_works_in_the_users_folder(users: Path) -> None:
    with private_folder(Rank(0, 2, 0, 2)) as folder:
        Path("log.txt").write_text("mine")
        folder.own_file("log.txt", truncated=True)
    assert (users / "log.txt").read_text() == "mine"


def test_a_folder_with_too_many_files_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_ENTRIES == 100_000
    monkeypatch.setattr("hvdtrain.adopt.private_folder.MOST_ENTRIES", 5)
    users, own = tmp_path / "user", tmp_path / "own"
    for name in ("images/1", "images/2", "images/3", "out/1", "log"):
        (users / name).parent.mkdir(parents=True, exist_ok=True)
        (users / name).touch()
    for _ in range(2):
        mirror(users, own, FileCopies(users))
        assert (own / "images").is_symlink() and not (own / "out").is_symlink()
        assert contents(own).keys() == {"log", "out/1"}
        assert (own / "images" / "1").is_file()
        (users / "images" / "4").touch()


def top_of(folder: Path) -> Path:
    """Return the folder that holds all private folders of a rank."""
    return next(one for one in folder.parents if "hvdtrain-adopt-" in one.name)
