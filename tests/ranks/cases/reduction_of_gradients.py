"""What happens to one gradient between the ranks: precision, sparse tensors, dtypes, Adasum."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor
from small import RANK, SIZE, difference

import hvdtrain.keras as hvd
from hvdtrain.collectives.compression import BF16_MIN_ELEMENTS

SGD = keras.optimizers.SGD


def gradient_of(rank: int, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(rank).normal(size=shape) * scale).astype("float32")


def applied(gradients: list[Any], graph: bool = True, **kwargs: Any) -> list[np.ndarray]:
    """Return what SGD(-1) makes of variables of zeros: the reduced gradients."""
    variables = [
        keras.Variable(
            np.zeros(g.shape, "float32"),
            dtype=g.dtype.name if hasattr(g.dtype, "name") else g.dtype,
        )
        for g in gradients
    ]
    optimizer = hvd.DistributedOptimizer(SGD(1.0), **kwargs)
    optimizer.build(variables)

    def step(*given: Any) -> None:
        optimizer.apply(list(given), variables)

    (tf.function(step) if graph else step)(*gradients)
    return [-np.asarray(tf.cast(v.value, tf.float32)) for v in variables]


def mean_of(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return np.mean([gradient_of(rank, shape, scale) for rank in range(SIZE)], axis=0)


def case_compression() -> dict[str, float]:
    """Errors relative to the largest entry, for sizes below and above bf16's limit, odd ones too."""
    found = {}
    for name in ("none", "fp16", "bf16"):
        worst = 0.0
        for shape in ((3,), (BF16_MIN_ELEMENTS,), (131, 127), (20001,)):
            mine = tf.constant(gradient_of(RANK, shape))
            for graph in (True, False):
                (got,) = applied([mine], graph, compression=getattr(hvd.Compression, name))
                wanted = mean_of(shape)
                worst = max(worst, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
        found[name] = worst
    return found


def case_bf16_options() -> dict[str, float]:
    """bf16 with op=Sum, with groups, with backward_passes_per_step's sum."""
    shape = (20001,)
    mine = tf.constant(gradient_of(RANK, shape))
    wanted = mean_of(shape)
    top = np.abs(wanted).max()
    bf16 = hvd.Compression.bf16
    (summed,) = applied([mine], compression=bf16, op=hvd.Sum)
    one, two = applied([mine, 2 * mine], compression=bf16, groups=1)
    return {
        "sum": float(np.abs(summed / SIZE - wanted).max() / top),
        "groups": max(
            float(np.abs(one - wanted).max() / top), float(np.abs(two / 2 - wanted).max() / top)
        ),
        "allreduce": float(
            np.abs(hvd.allreduce(mine, compression=bf16, name="b").numpy() - wanted).max() / top
        ),
    }


def case_range() -> dict[str, float]:
    """A gradient of 1e6 is beyond float16's 65504 and inside bfloat16's range."""
    mine = tf.fill([20001], 1e6)
    return {
        name: float(applied([mine], compression=getattr(hvd.Compression, name))[0][7])
        for name in ("none", "fp16", "bf16")
    }


class Tenths(Compressor):
    """A compressor of one's own: whole tenths, as int32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.cast(tf.round(tensor * 10), tf.int32), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tf.cast(tensor, ctx) / 10


def case_own_compressor() -> float:
    mine = gradient_of(RANK, (50,))
    (got,) = applied([tf.constant(mine)], compression=Tenths, op=hvd.Sum)
    tenths = sum(np.round(gradient_of(rank, (50,)) * np.float32(10)) for rank in range(SIZE))
    return difference([got], [tenths / 10])


def case_sparse() -> dict[str, float]:
    return {
        f"dense {dense}, graph {graph}": sparse(dense, graph)
        for dense in (True, False)
        for graph in (True, False)
    }


def sparse(dense: bool, graph: bool) -> float:
    """An Embedding's gradient in one group with a dense one: other rows, twice the same, on each rank."""
    rows = [1, 4, 4] if RANK == 0 else [4] * (RANK + 1)
    mine = tf.IndexedSlices(
        tf.fill([len(rows), 2], float(RANK + 1)), tf.constant(rows), tf.constant([6, 2])
    )
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3,), (6, 2), (3,))]
    optimizer = hvd.DistributedOptimizer(SGD(1.0), sparse_as_dense=dense, groups=1)
    optimizer.build(variables)

    def step() -> None:
        optimizer.apply([tf.fill([3], float(RANK)), mine, tf.fill([3], float(RANK))], variables)

    (tf.function(step) if graph else step)()
    wanted = np.zeros((6, 2))
    wanted[1] = 1 / SIZE
    wanted[4] = (2 + sum((r + 1) ** 2 for r in range(1, SIZE))) / SIZE
    mean = np.full(3, (SIZE - 1) / 2)
    return difference([-v.numpy() for v in variables], [mean, wanted, mean])


def case_dtypes() -> dict[str, float]:
    """bfloat16, float16 and float64 variables, each alone and in one group."""
    found = {}
    for groups in (None, 1):
        given = [
            tf.fill([8], tf.cast(RANK + 1, dtype))
            for dtype in (tf.bfloat16, tf.float16, tf.float64, tf.float32)
        ]
        got = applied(given, groups=groups)
        found[str(groups)] = difference(got, [np.full(8, (SIZE + 1) / 2)] * len(given))
    return found


def case_adasum() -> float:
    """Two ranks: a (1 - ab / 2aa) + b (1 - ab / 2bb), of which Horovod makes the tree of more."""
    a, b = (gradient_of(rank, (40,)).astype("float64") + 0.5 for rank in range(2))
    (got,) = applied([tf.constant(gradient_of(RANK, (40,)) + 0.5)], op=hvd.Adasum)
    return difference([got], [a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))])
