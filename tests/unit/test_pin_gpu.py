"""A rank takes one GPU, once: devices of TensorFlow are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.errors import UsageError
from hvdtrain.runtime import Rank


class Devices:
    """TensorFlow's settings of `number` GPUs, which it fixes at its first operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.gpus = [f"GPU:{index}" for index in range(number)]
        self.visible: list[str] = list(self.gpus)
        self.growing: set[str] = set()
        self.limited: dict[str, Any] = {}
        self.used = False
        config = SimpleNamespace(
            list_physical_devices=lambda kind: list(self.gpus),
            get_visible_devices=lambda kind: list(self.visible),
            set_visible_devices=self.show,
            get_logical_device_configuration=self.limited.get,
            experimental=SimpleNamespace(
                get_memory_growth=self.growing.__contains__,
                set_memory_growth=lambda gpu, _: self.growing.add(gpu),
            ),
        )
        monkeypatch.setattr(tf, "config", config)
        monkeypatch.setattr(runtime, "_context_is_open", lambda: self.used)

    def show(self, gpu: Any, kind: str) -> None:
        assert not self.used
        self.visible = [gpu]


def local(rank: int) -> Rank:
    return Rank(rank, 2, rank, 2)


@pytest.mark.parametrize(("number", "mine"), [(1, "GPU:0"), (2, "GPU:1")])
def test_a_second_call_changes_nothing(
    number: int, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch, number)
    runtime._pin_gpu(local(1))
    devices.used = True
    runtime._pin_gpu(local(1))
    assert devices.visible == [mine]
    assert devices.growing == {mine}


@pytest.mark.parametrize("number", [1, 2])
def test_tensorflow_that_was_used_before_is_refused(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(monkeypatch, number).used = True
    with pytest.raises(UsageError, match="used before"):
        runtime._pin_gpu(local(1))


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_alone_is_told_that_tensorflow_has_taken_the_memory(
    number: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.delenv(runtime.GROWTH, raising=False)
    devices = Devices(monkeypatch, number)
    devices.used = True
    runtime._pin_gpu(Rank(0, 1, 0, 1))
    assert devices.visible == devices.gpus and not devices.growing
    (warning,) = recwarn
    assert "taken all memory of " + ("the GPU:" if number == 1 else "2 GPUs:") in str(
        warning.message
    )


@pytest.mark.parametrize("how", ["grows", "limit", "variable"])
def test_a_rank_alone_whose_memory_grows_is_told_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv(runtime.GROWTH, "true" if how == "variable" else "")
    devices = Devices(monkeypatch, 2)
    devices.used = True
    devices.growing |= set(devices.gpus) if how == "grows" else set()
    devices.limited |= {gpu: "1 GB" for gpu in devices.gpus if how == "limit"}
    runtime._pin_gpu(Rank(0, 1, 0, 1))
    assert not recwarn.list
