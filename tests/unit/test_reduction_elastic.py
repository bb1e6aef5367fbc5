"""Graphs that outlive a change of the number of ranks, as in an elastic job. Nothing is launched."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.communicator import Average, Communicator, Min, Sum
from hvdtrain.collectives.reduction import GradientReducer, Reduction


@dataclass(frozen=True)
class Alike(Communicator):
    """Ranks that all have the same tensors.

    Attributes:
        traced: Number of ranks while a graph is traced.
        now: Number of ranks while it runs.
    """

    traced: int
    now: tf.Variable

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.traced

    @property
    def ranks(self) -> list[int]:
        return list(range(self.traced))

    def is_global(self) -> bool:
        return True

    def _may_grow(self) -> bool:
        return True

    def size_at_run(self) -> Any:
        return self.now.read_value()

    def _allreduce(
        self, wire: tf.Tensor, name: str, op: Any, prescale: float, postscale: float
    ) -> tf.Tensor:
        if op == Min:
            return wire
        total = wire * prescale * postscale
        return total if op == Average else total * tf.cast(self.now, wire.dtype)

    def _allgather(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        copies = tf.gather(wire[tf.newaxis], tf.zeros([self.now], tf.int32))
        return tf.reshape(copies, [-1, *wire.shape[1:]])

    def _alltoall(self, wire: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        return self._allgather(wire[: splits[0]], name)

    _reducescatter = _broadcast = _allgather


LARGE, SMALL = [16_400], [7]


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize(
    "compression",
    [
        hvd.Compression.none,
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        hvd.Compression.top_k(1.0),
        hvd.Compression.power_sgd(),
    ],
)
def test_a_graph_of_two_ranks_serves_three(compression: Any, op: Any) -> None:
    ranks = Alike(2, tf.Variable(2))
    reducer = GradientReducer(Reduction(process_set=ranks, compression=compression, op=op))
    variables = [tf.Variable(tf.zeros(shape)) for shape in (LARGE, SMALL, SMALL)]
    reducer.build(variables)
    # All elements of the first are equal, as bfloat16 sums are computed in parts by different ranks.
    own = [np.full(LARGE, 1.3, "float32"), np.linspace(-1, 2, *SMALL, dtype="float32")]
    slices = tf.IndexedSlices(tf.constant(own[1][:3]), tf.constant([4, 0, 2]), tf.constant(SMALL))
    step = tf.function(lambda: reducer([*map(tf.constant, own), slices], variables))
    for count in (2, 3, 1):
        ranks.now.assign(count)
        factor = count if op == Sum else 1
        for found, gradient in zip(step(), [*own, tf.convert_to_tensor(slices)], strict=True):
            # 16 bits have a relative error of 2**-9, twice.
            np.testing.assert_allclose(
                tf.convert_to_tensor(found), gradient * np.float32(factor), rtol=2**-8, atol=1e-6
            )
    assert step.experimental_get_tracing_count() == 1


VALUES = tf.ones([3, 2])


def gradient_through(collective: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(VALUES)
        loss = tf.reduce_sum(collective(VALUES))
    return tape.gradient(loss, VALUES)


@functools.cache
def batch_normalization() -> keras.layers.Layer:
    layer = hvd.SyncBatchNormalization()
    layer.build(VALUES.shape)
    return layer


def normalized(values: tf.Tensor) -> tf.Tensor:
    return tf.convert_to_tensor(batch_normalization()(values, training=True)) ** 2


COLLECTIVES = {
    "bf16": lambda: hvd.allreduce(VALUES, compression=hvd.Compression.bf16),
    "slices": lambda: hvd.allreduce(tf.IndexedSlices(VALUES, tf.range(3))).values,
    "alltoall": lambda: hvd.alltoall(VALUES),
    "gradient of a reducescatter": lambda: gradient_through(hvd.reducescatter),
    "gradient of an allgather": lambda: gradient_through(hvd.allgather),
    "gradient of a broadcast": lambda: gradient_through(lambda value: hvd.broadcast(value, 0)),
    "gradient of a maximum": lambda: gradient_through(lambda v: hvd.allreduce(v, op=hvd.Max)),
    "batch normalization": lambda: gradient_through(normalized),
}


ASKED = {
    # For the parts, and for the mean.
    "bf16": (2, 0),
    "slices": (1, 0),
    "alltoall": (1, 0),
    "gradient of a reducescatter": (1, 0),
    "gradient of an allgather": (1, 0),
    "gradient of a broadcast": (1, 1),
    "gradient of a maximum": (2, 1),
    "batch normalization": (1, 1),
}
"""How often a graph asks for the number of ranks, and for the rank."""


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_asks_for_its_place_among_the_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvdtrain.init()
    batch_normalization()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    graph = tf.function(COLLECTIVES[name]).get_concrete_function().graph
    found = Counter(one.type for one in graph.get_operations())
    assert (found["HorovodSize"], found["HorovodRank"]) == ASKED[name]
