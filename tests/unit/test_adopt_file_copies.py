"""Small files of the user in the private folder of a rank: a script reads there what it reads in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.adopt.private_folder import PrivateFolder, private_folder
from hvdtrain.runtime import Rank, init


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs.txt").write_text("1")
    (tmp_path / "large.bin").write_bytes(bytes(2 << 20))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def private(users: Path) -> Iterator[PrivateFolder]:
    init()
    with private_folder(Rank(1, 2, 1, 2)) as folder:
        yield folder


def written(path: Path, text: str) -> None:
    """Write `text`, at another time than before, whatever the file system's clock."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_what_rank_0_writes_is_not_read_before_a_refresh(
    users: Path, private: PrivateFolder
) -> None:
    written(users / "runs.txt", "2")
    assert Path("runs.txt").read_text() == "1"
    private.refresh()
    assert Path("runs.txt").read_text() == "2"
    written(users / "runs.txt", "3")
    private.refresh()
    assert Path("runs.txt").read_text() == "3"


def test_what_a_rank_has_written_stays(users: Path, private: PrivateFolder) -> None:
    Path("runs.txt").write_text("5")
    for _ in range(2):
        written(users / "runs.txt", "2")
        private.refresh()
        assert Path("runs.txt").read_text() == "5"


def test_what_rank_0_has_removed_is_gone_after_a_refresh(
    users: Path, private: PrivateFolder
) -> None:
    (users / "runs.txt").unlink()
    assert Path("runs.txt").exists()
    private.refresh()
    assert not Path("runs.txt").exists()


def test_what_a_rank_has_removed_comes_again_as_long_as_it_is_there(
    users: Path, private: PrivateFolder
) -> None:
    Path("runs.txt").unlink()
    private.refresh()
    assert Path("runs.txt").read_text() == "1"


def test_a_copy_is_as_old_as_the_file(users: Path, private: PrivateFolder) -> None:
    theirs, ours = (users / "runs.txt").stat(), Path("runs.txt").stat()
    assert (ours.st_mtime_ns, ours.st_mode) == (theirs.st_mtime_ns, theirs.st_mode)


def test_large_files_are_links(users: Path, private: PrivateFolder) -> None:
    assert Path("large.bin").is_symlink() and not Path("runs.txt").is_symlink()


@pytest.mark.parametrize(("limit", "value"), [("ROOM", 250), ("MOST", 4)])
def test_the_copies_have_an_end(
    users: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """Beside runs.txt, two of three."""
    (users / "d").touch()
    monkeypatch.setattr(f"hvdtrain.adopt.file_copies.{limit}", value)
    for name in "abc":
        (users / name).write_bytes(bytes(100))
    with private_folder(Rank(1, 2, 1, 2)):
        assert sum(Path(name).is_symlink() for name in ("a", "b", "c", "d", "runs.txt")) == 1


def test_what_cannot_be_copied_is_a_link(users: Path) -> None:
    os.mkfifo(users / "pipe")
    (users / "dangling").symlink_to("nowhere")
    (users / "folder").symlink_to(users.parent)
    (users / "endless").symlink_to("/proc/kmsg")
    (users / ".ssh").mkdir()
    (users / ".ssh" / "id").write_text("secret")
    with private_folder(Rank(1, 2, 1, 2)):
        links = ("pipe", "dangling", "folder", "endless", ".ssh/id")
        assert all(Path(name).is_symlink() for name in links)
