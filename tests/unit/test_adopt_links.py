"""Paths of a rank that lead out of its private folder: `..`, links to folders, and the script's place without links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from hvdtrain.adopt import private_folder as module
from hvdtrain.adopt.private_folder import PrivateFolder, private_folder
from hvdtrain.runtime import Rank, init

SECOND = Rank(1, 2, 1, 2)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a link to a folder elsewhere, beside a folder of data."""
    init()
    for name in ("project/src/train.py", "data/x", "elsewhere/old/x", "elsewhere/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "project" / "out").symlink_to("../elsewhere")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture
def private(project: Path) -> Iterator[PrivateFolder]:
    with private_folder(SECOND) as folder:
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_rank_reads_what_is_beside_its_folder(private: PrivateFolder) -> None:
    assert Path("../data/x").read_text() == "data/x"
    assert Path("../../", Path.cwd().parent.name, "data", "x").read_text() == "data/x"
    assert Path("out/x").read_text() == "elsewhere/x"


def append(name: str) -> None:
    with Path(name).open("a") as file:
        file.write("mine")


WRITES: dict[str, Callable[[], object]] = {
    "a new file above": lambda: Path("../new").write_text("mine"),
    "in a folder above": lambda: Path("../data/x").write_text("mine"),
    "in a folder of a link": lambda: Path("out/old/x").write_text("mine"),
    "append": lambda: append("out/x"),
    "mkdir": lambda: Path("out/new/deep").mkdir(parents=True),
    "remove": lambda: Path("out/x").unlink(),
    "rename": lambda: Path("out/x").rename("out/y"),
    "rmtree": lambda: shutil.rmtree("out/old"),
    "a folder of a link to a folder": lambda: Path("out/new").symlink_to("old"),
    "a checkpoint": lambda: tf.train.Checkpoint(v=tf.Variable(1.0)).save("out/c/checkpoint"),
    "an operation": lambda: tf.io.write_file("out/x", "mine"),
    "an operation, a new file": lambda: tf.io.write_file(filename="out/y", contents="mine"),
    "a cache": lambda: list(tf.data.Dataset.range(3).cache("out/cache")),
    "a saved Dataset": lambda: tf.data.Dataset.range(3).save("out/range"),
    "a summary": lambda: tf.summary.create_file_writer("out/log").close(),
    "makedirs": lambda: tf.io.gfile.makedirs("out/made/deep"),
    "TFRecords": lambda: tf.io.TFRecordWriter("out/records").close(),
    "a SavedModel": lambda: tf.saved_model.save(tf.Module(), "out/exported"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_a_rank_writes_there_is_its_own(
    project: Path, private: PrivateFolder, write: Callable[[], object]
) -> None:
    before, names = contents(project.parent), sorted(project.parent.rglob("*"))
    own = contents(Path.cwd().parent), sorted(Path("out").rglob("*"))
    write()
    assert contents(project.parent) == before and sorted(project.parent.rglob("*")) == names
    assert (contents(Path.cwd().parent), sorted(Path("out").rglob("*"))) != own


def test_what_rank_0_writes_there_is_seen(project: Path, private: PrivateFolder) -> None:
    Path("out/mine").write_text("mine")
    before = private.before_fit()
    for name in ("elsewhere/x", "elsewhere/new", "elsewhere/mine", "new"):
        (project.parent / name).write_text("in a fit")
    private.after_fit(before, [])
    for name in ("out/x", "out/new", "../new"):
        assert Path(name).read_text() == "in a fit"


def test_a_large_folder_stays_a_link(
    project: Path, private: PrivateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 2)
    Path("out/mine").write_text("mine")
    assert Path("out").is_symlink() and (project.parent / "elsewhere" / "mine").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_the_script_without_links_is_the_ranks_own(
    project: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """As a script finds its own folder."""
    monkeypatch.setattr("hvdtrain.adopt.file_copies.MOST", 0)
    script = project / "src" / "train.py"
    if is_link:
        script = project / "link.py"
        script.symlink_to("src/train.py")
    with private_folder(SECOND, script) as folder:
        given = folder.own_path(str(script))
        assert os.path.realpath(given) == str(Path("src/train.py").absolute())
        assert Path(given).is_symlink() == is_link
