"""A reduction in eager mode runs on the device of its tensor, so that NCCL can take a GPU's."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.collectives.communicator import HorovodRanks
from hvdtrain.collectives.placement import on_device


class TwoRanks(HorovodRanks):
    """Two ranks for a process that has started no Horovod."""

    def size(self) -> int:
        return 2


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The `device_dense` of each reduction that reaches Horovod."""
    found: list[str] = []

    def reduction(tensors: Any, *, device_dense: str = "", **_: Any) -> Any:
        found.append(device_dense)
        return tensors

    for name in ("allreduce", "reducescatter"):
        monkeypatch.setattr(hvd, name, reduction)
    return found


def reduce_in_each_way(tensor: tf.Tensor) -> None:
    ranks = TwoRanks(hvd.ProcessSet([0, 1]))
    ranks.allreduce(tensor, "one")
    ranks.grouped_allreduce([tensor, tensor], "group")
    ranks.reducescatter(tensor, "part")


def test_an_eager_reduction_is_where_its_tensor_is(placed: list[str]) -> None:
    tensor = tf.ones([2])
    reduce_in_each_way(tensor)
    assert placed == [tensor.device] * 3
    assert tensor.device.endswith(":0")


def test_the_callers_device_counts_more(placed: list[str]) -> None:
    tensor = tf.ones([2])
    with tf.device("CPU:0"):
        reduce_in_each_way(tensor)
    assert placed == [""] * 3


def test_a_function_leaves_the_device_to_tensorflow(placed: list[str]) -> None:
    tf.function(reduce_in_each_way).get_concrete_function(tf.ones([2]))
    assert placed == [""] * 3


def test_no_name_sets_no_device() -> None:
    with on_device(""):
        assert context.context().device_name == ""
    with on_device("CPU:0"):
        assert context.context().device_name.endswith("CPU:0")
