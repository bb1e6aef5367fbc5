"""The wheel cache: whole or absent, one process at a time."""

import multiprocessing
import random
import zipfile
from pathlib import Path

import click
import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.install.cache import WheelCache, cache_folder

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "built" / NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/library.so", random.Random(0).randbytes(25_000))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    return WheelCache(tmp_path / "cache")


def test_keeps_and_finds(cache: WheelCache, wheel: Path) -> None:
    assert cache.find("key") is None
    kept = cache.keep("key", wheel)
    assert kept == cache.wheels / "key" / NAME
    assert cache.find("key") == kept
    assert cache.find("other") is None
    assert kept.read_bytes() == wheel.read_bytes()


def test_truncated_wheel_is_absent_and_is_replaced(cache: WheelCache, wheel: Path) -> None:
    kept = cache.keep("key", wheel)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert cache.find("key") is None
    cache.keep("key", wheel)
    assert cache.find("key") == kept


def test_flipped_bit_is_noticed(cache: WheelCache, wheel: Path) -> None:
    kept = cache.keep("key", wheel)
    content = bytearray(kept.read_bytes())
    content[1000] ^= 1
    kept.write_bytes(content)
    assert cache.find("key") is None


def test_failed_copy_leaves_what_was_there(cache: WheelCache, wheel: Path, tmp_path: Path) -> None:
    kept = cache.keep("key", wheel)
    with pytest.raises(OSError):
        cache.keep("key", tmp_path / "absent.whl")
    assert cache.find("key") == kept
    assert [path.name for path in cache.wheels.iterdir()] == ["key"]


def _hold(folder: Path, key: str, holding: "multiprocessing.synchronize.Event") -> None:
    with WheelCache(folder).lock(key):
        holding.set()
        multiprocessing.Event().wait(60)


def test_lock_waits_for_the_other_process_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    holding = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, "key", holding), daemon=True)
    other.start()
    assert holding.wait(30)
    said: list[str] = []
    # The holder is killed, not asked: its lock must not outlive it.
    monkeypatch.setattr(click, "echo", lambda text: (said.append(text), other.kill()))
    with WheelCache(tmp_path).lock("another key"):
        assert said == []
    with WheelCache(tmp_path).lock("key"):
        assert said == ["Another process is building the same wheel: waiting for it ..."]
    other.join(10)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HVDTRAIN_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/hvdtrain")),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/hvdtrain"),
        ({"HVDTRAIN_CACHE": "here"}, Path.cwd() / "here"),
        ({"HVDTRAIN_CACHE": "~/wheels"}, Path.home() / "wheels"),
    ],
)
def test_cache_folder(environment: dict[str, str], folder: Path) -> None:
    assert cache_folder(environment) == folder


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = WheelCache(tmp_path / "file")
    with (
        pytest.raises(HvdtrainError, match=r"cannot write to the cache .*: Not a dir.*; set HVDTR"),
        cache.lock("key"),
    ):
        pass
