"""What Horovod's own tests of its TensorFlow module ask for, beside the table in collectives.py."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from collectives import DIMENSIONS, EVERY_DTYPE, ONLY_MOVED, RANKS, error_of, gap

import hvdtrain.keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
SPARSE_DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")


def slices(rank: int, dtype: str, dimensions: int, seed: int = 0) -> tf.IndexedSlices:
    """Rows `rank` and `rank + 1` of three: the ranks share one."""
    shape = (2, *(2,) * (dimensions - 1))
    values = np.random.default_rng([rank, seed]).integers(0, 4, shape).astype(dtype)
    return tf.IndexedSlices(
        tf.constant(values), tf.constant([rank, rank + 1]), tf.constant([SIZE + 1, *shape[1:]])
    )


def as_array(value: Any) -> np.ndarray:
    """Dense, with slices of one row added up, in float64: whole numbers that were divided have fractions."""
    if not isinstance(value, tf.IndexedSlices):
        return tf.cast(value, tf.float64).numpy()
    whole = np.zeros(value.dense_shape.numpy())
    np.add.at(whole, value.indices.numpy(), value.values.numpy().astype("float64"))
    return whole


def case_indexed_slices() -> dict[str, float]:
    """Their sum and mean: one, a group, and a group of slices and tensors; eager and in a tf.function."""
    found = {}
    # Tracing takes the time: one number of dimensions does.
    ways = [*((False, dimensions) for dimensions in DIMENSIONS), (True, 2)]
    for dtype, (graph, dimensions), op in itertools.product(
        SPARSE_DTYPES, ways, (hvd.Sum, hvd.Average)
    ):
        everyone = [[slices(rank, dtype, dimensions, seed) for seed in range(3)] for rank in RANKS]
        dense = [[tf.constant([4 * (rank + 1)], dtype)] for rank in RANKS]
        given = [sparse + tensors for sparse, tensors in zip(everyone, dense, strict=True)]
        factor = 1 if op == hvd.Sum else 1 / SIZE
        wanted = [factor * sum(map(as_array, one)) for one in zip(*given, strict=True)]

        def step(own: list[Any] = given[RANK], op: Any = op) -> list[Any]:
            mixed = hvd.grouped_allreduce(own, op=op)
            return [hvd.allreduce(own[0], op=op), *hvd.grouped_allreduce(own[1:3], op=op), *mixed]

        results = (tf.function(step, autograph=False) if graph else step)()
        pairs = zip(results, [*wanted[:3], *wanted], strict=True)
        apart = [float(np.abs(as_array(one) - other).max()) for one, other in pairs]
        found[f"{dtype}, {dimensions}, {op}, {graph}"] = max(apart)
    return found


def case_broadcast_in_place() -> dict[str, float]:
    """Of several variables at once, Keras's and TensorFlow's; every dtype, every root."""
    found = {}
    dtypes = [name for name in (*EVERY_DTYPE, *ONLY_MOVED) if name != "bfloat16"]
    for dtype, root in itertools.product(dtypes, RANKS):
        shapes = [(3,) * dimensions for dimensions in DIMENSIONS]
        # Even and odd: a bool that differs between two ranks, too.
        mine, wanted = ([np.full(s, n % 2, dtype) for s in shapes] for n in (RANK, root))
        variables = [tf.Variable(value) for value in mine[:2]]
        variables.append(keras.Variable(mine[2], dtype=dtype, trainable=False))
        hvd.broadcast_variables(variables, root, inplace=bool(root))
        pairs = zip(variables, wanted, strict=True)
        found[f"{dtype} from {root}"] = max(gap(tf.convert_to_tensor(v), w) for v, w in pairs)
    return found


def case_join() -> list[Any]:
    """Each rank is the first to join, often: it counts as zeros, and all are told who was last."""
    found: list[Any] = []
    for dtype, dimensions, first in itertools.product(
        ("int32", "int64", "float16", "float32", "float64"), DIMENSIONS, RANKS
    ):
        values = tf.cast(tf.ones([3] * dimensions), dtype)
        if first != RANK:
            several = hvd.grouped_allreduce([values, values[:1]], op=hvd.Sum)
            alone = [gap(hvd.allreduce(values, op=hvd.Sum), values), gap(several[1], values[:1])]
            means = gap(hvd.allreduce(2 * values), tf.cast(2 / SIZE, dtype) * values)
            gathering = error_of(lambda values=values: hvd.allgather(values))
            found.append([*alone, means, "not supported with Join" in gathering])
        found.append(int(hvd.join()) != first)
    found.append(error_of(tf.function(hvd.join, autograph=False)))
    return found


def case_queries_in_a_graph() -> bool:
    @tf.function
    def ask() -> list[tf.Tensor]:
        operations = hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()
        return [*operations, hvd.process_set_included_op()]

    known = [RANK, SIZE, hvd.local_rank(), hvd.local_size(), 1]
    return [int(found) for found in ask()] == known


def case_compression() -> list[str]:
    """What fp16 makes of each dtype, and of that again."""
    found = []
    for dtype in (*EVERY_DTYPE, *ONLY_MOVED):
        tensor = tf.cast(tf.ones([2, 2]), dtype)
        wire, context = hvd.Compression.fp16.compress(tensor)
        back = hvd.Compression.fp16.decompress(wire, context)
        floating = tf.as_dtype(dtype).is_floating
        if gap(back, tensor) or wire.dtype != (tf.float16 if floating else tensor.dtype):
            found.append(dtype)
    return found


def case_objects() -> list[Any]:
    """Dicts, whose keys need not be texts, and which may differ."""
    whole = {"hello": 123, 0: [1, 2]}
    mine = {"loss": RANK} | ({"accuracy": 42} if RANK == 1 else {})
    return [
        hvd.broadcast_object(whole if RANK == 0 else {}, root_rank=0) == whole,
        hvd.allgather_object(mine) == [{"loss": 0}, {"loss": 1, "accuracy": 42}],
    ]


def case_elastic_variables() -> list[Any]:
    """Synced, then changed and restored, then changed and committed."""
    variables = [tf.Variable(np.full((2, 2), 1.0 + RANK)), keras.Variable([1.0 + RANK])]
    state = hvd.elastic.TensorFlowState(variables, batch=20 + RANK, epoch=10 + RANK)

    def seen() -> list[Any]:
        return [[float(np.mean(np.asarray(v))) for v in variables], state.batch, state.epoch]

    def change() -> None:
        for variable in variables:
            variable.assign(np.zeros(variable.shape))
        state.batch, state.epoch = 21, 11

    state.sync()
    found = [seen()]
    change()
    state.restore()
    found.append(seen())
    change()
    state.commit()
    state.restore()
    return [*found, seen()]


def case_model_parallel() -> dict[str, float]:
    """An embedding of its own on each rank, whose rows travel by alltoall; the layers behind it are shared."""
    tables = [np.arange(14.0).reshape(7, 2) / 10, np.arange(18.0).reshape(9, 2) / 7]
    kernel = np.array([[0.3], [-0.2], [0.5], [0.1]])
    # Rank r looks up the first row of its table for rank 0's example and the second for rank 1's.
    looked_up = [np.array([1, 4]), np.array([8, 2])]
    table, shared = tf.Variable(tables[RANK]), tf.Variable(kernel)

    def loss_of(rows: tf.Tensor, kernel: Any) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.softplus(-(tf.reshape(rows, [1, 4]) @ kernel)))

    def step() -> list[tf.Tensor]:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(hvd.alltoall(tf.gather(table, looked_up[RANK])), shared)
        tape.register_local_source(table)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [table, shared])]

    whole = [tf.Variable(one) for one in tables]
    with tf.GradientTape() as tape:
        looked = [tf.gather(one, rows) for one, rows in zip(whole, looked_up, strict=True)]
        examples = [tf.stack([rows[example] for rows in looked]) for example in RANKS]
        loss = tf.add_n([loss_of(rows, shared) for rows in examples]) / SIZE
    wanted = tape.gradient(loss, [whole[RANK], shared])
    wanted = [tf.convert_to_tensor(gradient) for gradient in wanted]
    return {"eager": gap(step(), wanted), "graph": gap(tf.function(step)(), wanted)}
