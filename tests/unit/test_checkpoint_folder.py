"""A checkpoint is complete or absent after every interruption, and a damaged one is never used."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdtrain.checkpoint import folder as checkpoints
from hvdtrain.checkpoint.folder import Checkpoint, Damaged, Disk, load, newest, numbered, save
from hvdtrain.errors import UsageError


def state(value: float) -> Checkpoint:
    """A checkpoint that is told from others by `value`, with what is hard to write."""
    arrays = {
        "b/transposed": np.full((3, 2), value, np.float32).T + np.arange(3, dtype=np.float32),
        "a/half": np.array([value, 2.5], ml_dtypes.bfloat16),
        "scalar": np.array(int(value), np.int64),
        "flag": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float16),
    }
    ranks = [{"seed": np.array([value, 7]), "best": None}, {"seed": (1, 2)}]
    return Checkpoint({"step": value, "layout": "none"}, arrays, ranks)


def assert_same(found: Checkpoint | None, value: float) -> None:
    assert found is not None
    expected = state(value)
    assert found.facts == expected.facts
    assert list(found.arrays) == list(expected.arrays)
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    np.testing.assert_array_equal(found.ranks[0]["seed"], expected.ranks[0]["seed"])
    assert found.ranks[1] == expected.ranks[1]


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    save(tmp_path, 3, state(3.0))
    assert_same(newest(tmp_path), 3.0)
    assert newest(tmp_path / "elsewhere") is None


def test_one_that_an_earlier_version_wrote_is_read() -> None:
    """Written once and kept: a change of the format that forgets to raise FORMAT fails here."""
    assert_same(newest(Path(__file__).with_name("golden") / "checkpoint"), 5.0)


def test_one_of_another_format_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run would start from scratch, or from an older one, in the place of a change of version."""
    save(tmp_path, 3, state(3.0))
    monkeypatch.setattr(checkpoints, "FORMAT", checkpoints.FORMAT + 1)
    with pytest.raises(UsageError, match=r"format 2, .* reads format 3: resume with the version"):
        newest(tmp_path)
    # The first format was a folder of files.
    (tmp_path / "step-000000004").mkdir()
    (tmp_path / "step-000000004" / "manifest.json").touch()
    with pytest.raises(UsageError, match=r"step-000000004 has format 1, "):
        newest(tmp_path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (9, 10, 100):
        save(tmp_path, number, state(number), keep=2)
    assert [path.name for path in numbered(tmp_path)] == ["step-000000100", "step-000000010"]
    assert_same(newest(tmp_path), 100.0)


class Recorder(Disk):
    """A disk that remembers what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[tuple] = []

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        super().write(path, parts)
        self.done.append(("write", path, path.read_bytes()))

    def flush(self, path: Path) -> None:
        self.done.append(("flush", path))
        super().flush(path)

    def rename(self, path: Path, to: Path) -> None:
        self.done.append(("rename", path, to))
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self.done.append(("remove", path))
        super().remove(path)


LOSSES: dict[str, Callable[[bytes], bytes | None]] = {
    "all that was written is there": lambda data: data,
    "unflushed files are empty": lambda data: b"",
    "unflushed files are halves": lambda data: data[: len(data) // 2],
    "unflushed files are gone": lambda data: None,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_loss_of_power_at_any_moment_the_newest_complete_one_loads(
    tmp_path: Path, loss: str
) -> None:
    """Every prefix of the operations, without what was not flushed by then; names not flushed may stay or go."""
    disk = Recorder()
    root = tmp_path / "run"
    root.mkdir()
    save(root, 1, state(1.0), keep=1, disk=disk)
    first = len(disk.done)
    save(root, 2, state(2.0), keep=1, disk=disk)
    renamed = [n for n, op in enumerate(disk.done) if op[0] == "rename"][1]
    flushed = next(n for n in range(renamed, len(disk.done)) if disk.done[n] == ("flush", root))
    for length in range(first, len(disk.done) + 1):
        for rename_lost in (False, True):
            if rename_lost and not renamed < length <= flushed:
                continue
            replay(disk.done[:length], root, LOSSES[loss], renamed if rename_lost else None)
            arrived = length > renamed and not rename_lost
            assert_same(newest(root), 2.0 if arrived else 1.0)
            save(root, 3, state(3.0))
            assert_same(newest(root), 3.0)


def replay(
    done: list[tuple], root: Path, lose: Callable[[bytes], bytes | None], without: int | None
) -> None:
    """Leave in `root` what a disk has after the operations in `done`, but for the one numbered `without`."""
    shutil.rmtree(root)
    root.mkdir()
    for number, (name, path, *more) in enumerate(done):
        if number == without:
            continue
        if name == "write":
            flushed = ("flush", path) in done[number:]
            data = more[0] if flushed else lose(more[0])
            if data is not None:
                path.write_bytes(data)
        elif name != "flush":
            getattr(Disk(), name)(path, *more)


def test_a_failed_save_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1.0))
    operations = Recorder()
    save(tmp_path, 2, state(2.0), keep=2, disk=operations)
    (tmp_path / "step-000000002").unlink()
    before_rename = [op[0] for op in operations.done].index("rename")
    for fails_at in range(before_rename + 1):
        with pytest.raises(OSError, match=r"No space left .*step-000000002'"):
            save(tmp_path, 2, state(2.0), keep=2, disk=Full(fails_at))
        assert_same(newest(tmp_path), 1.0)
        assert not list(tmp_path.glob(".*")), "on a full disk others have use for the room"
    save(tmp_path, 2, state(2.0))
    assert_same(newest(tmp_path), 2.0)


@pytest.mark.filterwarnings("ignore:.*cannot be flushed to the disk:UserWarning")
@pytest.mark.parametrize(
    ("operation", "code", "left"), [("flush", 5, 1), ("flush", errno.EINVAL, 0), ("remove", 5, 1)]
)
def test_what_fails_after_the_renaming_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, code: int, left: int
) -> None:
    """The checkpoint is there; what was to be removed goes with the next save."""
    save(tmp_path, 1, state(1.0), keep=1)
    disk = Disk()
    done = getattr(disk, operation)

    def fail(path: Path) -> None:
        if path != tmp_path and operation == "flush":
            return done(path)
        raise OSError(code, "refused")

    monkeypatch.setattr(disk, operation, fail)
    path = save(tmp_path, 2, state(2.0), keep=1, disk=disk)
    assert_same(newest(tmp_path), 2.0)
    assert [one.name for one in numbered(tmp_path)] == [path.name, "step-000000001"][: 1 + left]
    last = save(tmp_path, 3, state(3.0), keep=1)
    assert numbered(tmp_path) == [last]


class Full(Recorder):
    """A disk that fails at one operation; a removal of what an earlier save left is none."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.left = fails_at

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        path.touch()
        self._count()
        super().write(path, parts)

    def flush(self, path: Path) -> None:
        self._count()
        super().flush(path)

    def rename(self, path: Path, to: Path) -> None:
        self._count()
        super().rename(path, to)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "a bit flipped": flip,
    "a folder": lambda path: (path.unlink(), path.mkdir())[1],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, state(1.0))
    DAMAGES[damage](save(tmp_path, 2, state(2.0)))
    with pytest.warns(UserWarning, match="step-000000002' is damaged: it ") as told:
        assert_same(newest(tmp_path), 1.0)
    assert len(told) == 1


def test_every_bit_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(1.0))
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged):
            load(path)
    path.write_bytes(whole)
    assert_same(load(path), 1.0)


def test_a_new_one_outlives_a_damaged_one_of_a_later_step(tmp_path: Path) -> None:
    flip(save(tmp_path, 9, state(9.0)))
    save(tmp_path, 5, state(5.0), keep=1)
    assert_same(newest(tmp_path), 5.0)
    assert [path.name for path in numbered(tmp_path)] == ["step-000000005"]


def test_a_leftover_that_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-000000001").mkdir()
    save(tmp_path, 2, state(2.0))
    assert_same(newest(tmp_path), 2.0)
