"""Which TPU is meant, and that its absence is said soon."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.strategies import tpu


@pytest.fixture
def chips(tmp_path: Path) -> Path:
    (tmp_path / "accel0").touch()
    return tmp_path


def refused(*arguments: object) -> str:
    start = time.monotonic()
    with pytest.raises(UsageError) as error:
        tpu.find_tpu(*arguments)  # type: ignore[arg-type]
    assert time.monotonic() - start < 2 * tpu.SECONDS
    assert "strategy tpu" in str(error.value)
    return str(error.value)


def test_none_at_all(tmp_path: Path) -> None:
    message = refused(None, {}, tmp_path)
    assert "no chip in" in message
    assert "TPU_NAME" in message


def test_local_without_chips(tmp_path: Path) -> None:
    assert "has none" in refused("local", {}, tmp_path)
    assert "has none" in refused(None, {"TPU_NAME": "local"}, tmp_path)


def test_chips_without_their_library(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    assert "pip install tensorflow-tpu" in refused(None, {}, chips)


def test_chips_with_their_library(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: object())
    assert tpu.find_tpu(None, {}, chips) == "local"
    (chips / "accel0").unlink()
    (chips / "vfio").mkdir()
    (chips / "vfio" / "vfio").touch()
    assert "no chip" in refused(None, {}, chips)
    (chips / "vfio" / "0").touch()
    assert tpu.find_tpu("local", {}, chips) == "local"


def test_an_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        assert tpu.find_tpu(address, {"TPU_NAME": "other"}, tmp_path) == address
        assert tpu.find_tpu(None, {"TPU_NAME": address}, tmp_path) == address
    assert f"no TPU answers at {address}" in refused(address, {}, tmp_path)
    assert "no TPU answers" in refused("grpc://127.0.0.1:port", {}, tmp_path)


def test_a_name_outside_of_googles_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        real = socket.create_connection
        monkeypatch.setattr(
            tpu.socket, "create_connection", lambda address, wait: real((address[0], port), wait)
        )
        metadata = {"GCE_METADATA_IP": "127.0.0.1"}
        assert tpu.find_tpu("my-tpu", metadata, tmp_path) == "my-tpu"
    assert "'my-tpu' can be looked up only on Google Cloud machines" in refused(
        "my-tpu", metadata, tmp_path
    )


def test_a_tpu_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's own message, first line, in one of ours."""
    monkeypatch.setattr(tpu, "find_tpu", lambda *_: "local")
    with pytest.raises(UsageError, match=r"the TPU 'local' cannot be started: .*TPU"):
        tpu.connect("local")


def test_an_error_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolver(tpu: str) -> None:
        raise RuntimeError

    monkeypatch.setattr(tpu, "find_tpu", lambda *_: "local")
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    with pytest.raises(UsageError, match="cannot be started: RuntimeError"):
        tpu.connect("local")
