"""Every collective of hvdtrain.keras, its values and its gradients, against the same written in NumPy and TensorFlow.

A row of `TABLE` has what rank r gives, the collective, and `whole`: what each rank gets, computed from what all give.
`whole` is differentiated by TensorFlow in one process, where nothing has to travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError

Tensors = list[tf.Tensor]
RANKS = range(hvd.size())
EVERY_DTYPE = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
ONLY_MOVED = ("uint16", "int16", "bool")
"""Dtypes that Horovod carries, but does not compute with."""
DIMENSIONS = (1, 2, 3)


@dataclass(frozen=True)
class Row:
    """One collective: `call` with what a rank gives, and `whole` with what each rank gives."""

    call: Callable[[Tensors], Any]
    whole: Callable[[list[Tensors]], list[Any]]
    shapes: Callable[[int], list[tuple[int, ...]]] = lambda rank: [(4, 3)]
    ranks: tuple[int, ...] = tuple(RANKS)


def given(rank: int, row: Row, dtype: str, dimensions: int = 2) -> Tensors:
    """What `rank` gives: small numbers that all dtypes hold exactly, a zero and ties between the ranks among them.

    What has two dimensions in the row gets as many as `dimensions`.
    """
    rng = np.random.default_rng(rank)
    shapes = [(*shape[:1], *shape[1:] * (dimensions - 1)) for shape in row.shapes(rank)]
    return [tf.cast(rng.integers(0, 4, shape), dtype) for shape in shapes]


def pairs(everyone: list[Tensors]) -> list[Tensors]:
    """The first tensors of all ranks, the second of all, ..."""
    return [list(one) for one in zip(*everyone, strict=True)]


def reduced(reduce: Any, **options: Any) -> Row:
    return Row(
        lambda own: hvd.allreduce(own[0], **options),
        lambda everyone: [reduce(tf.stack(pairs(everyone)[0]))] * len(everyone),
    )


def grouped(reduce: Any, **options: Any) -> Row:
    return Row(
        lambda own: hvd.grouped_allreduce(own, **options),
        lambda everyone: [[reduce(tf.stack(one)) for one in pairs(everyone)]] * len(everyone),
        lambda rank: [(2, 3), (5,), ()],
    )


def mean(stacked: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(stacked, 0) / len(stacked)


def total(stacked: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(stacked, 0)


def gathered(everyone: list[Tensors]) -> list[Tensors]:
    return [[tf.concat(one, 0) for one in pairs(everyone)]] * len(everyone)


def uneven(rank: int) -> list[tuple[int, ...]]:
    return [(1 + 2 * rank, 3), (3 - rank,)]


def exchanged(splits: Callable[[int], list[int]]) -> Callable[[list[Tensors]], list[tf.Tensor]]:
    """What each rank gets when rank r sends the rows `splits(r)`."""

    def whole(everyone: list[Tensors]) -> list[tf.Tensor]:
        parts = [tf.split(own[0], splits(rank)) for rank, own in enumerate(everyone)]
        return [tf.concat([sent[rank] for sent in parts], 0) for rank in RANKS]

    return whole


def sent(splits: Callable[[int], list[int]]) -> Row:
    return Row(
        lambda own: hvd.alltoall(own[0], splits(hvd.rank()))[0],
        exchanged(splits),
        lambda rank: [(sum(splits(rank)), 3)],
    )


def scattered(
    reduce: Any, rows: int = 4, factor: float = 1.0
) -> Callable[[list[Tensors]], list[Tensors]]:
    def whole(everyone: list[Tensors]) -> list[Tensors]:
        whole = [reduce(tf.stack(one)) for one in pairs(everyone)]
        sums = [one * tf.cast(factor, one.dtype) for one in whole]
        sizes = [rows // len(RANKS) + (rank < rows % len(RANKS)) for rank in RANKS]
        return [[tf.split(one, sizes)[rank] for one in sums] for rank in RANKS]

    return whole


def scatter(reduce: Any, rows: int = 4, factor: float = 1.0, **options: Any) -> Row:
    return Row(
        lambda own: [hvd.reducescatter(own[0], **options)],
        scattered(reduce, rows, factor),
        lambda rank: [(rows, 3)],
    )


INTEGERS = {
    "allreduce sum": reduced(total, op=hvd.Sum),
    "allreduce min": reduced(lambda t: tf.reduce_min(t, 0), op=hvd.Min),
    "allreduce max": reduced(lambda t: tf.reduce_max(t, 0), op=hvd.Max),
    "allreduce product": reduced(lambda t: tf.reduce_prod(t, 0), op=hvd.Product),
    "grouped allreduce sum": grouped(total, op=hvd.Sum),
    "allgather": Row(lambda own: [hvd.allgather(own[0])], gathered),
    "allgather uneven": Row(
        lambda own: [hvd.allgather(own[0])], gathered, lambda rank: uneven(rank)[:1]
    ),
    "allgather, nothing of one": Row(
        lambda own: [hvd.allgather(own[0])], gathered, lambda rank: [(2 * rank, 3)]
    ),
    "grouped allgather": Row(lambda own: hvd.grouped_allgather(own), gathered, uneven),
    "broadcast": Row(lambda own: hvd.broadcast(own[0], 1), lambda everyone: [everyone[1][0]] * 2),
    "broadcast of the first": Row(
        lambda own: hvd.broadcast(own[0], 0), lambda everyone: [everyone[0][0]] * 2
    ),
    "alltoall": Row(
        lambda own: hvd.alltoall(own[0]),
        exchanged(lambda rank: [1 + rank] * 2),
        lambda rank: [(2 + 2 * rank, 3)],
    ),
    "alltoall uneven": sent(lambda rank: [[1, 2], [3, 0]][rank]),
    "alltoall, one sends nothing": sent(lambda rank: [[0, 0], [2, 1]][rank]),
    "alltoall, one gets nothing": sent(lambda rank: [[0, 2], [0, 1]][rank]),
    "alltoall, rows left over": Row(
        lambda own: hvd.alltoall(own[0], [2, 1])[0],
        lambda everyone: [
            tf.concat([own[0][a:b] for own in everyone], 0) for a, b in [(0, 2), (2, 3)]
        ],
    ),
    "alltoall of nothing": sent(lambda rank: [0, 0]),
    "reducescatter sum": scatter(total, op=hvd.Sum),
    "reducescatter uneven": scatter(total, rows=5, op=hvd.Sum),
    "reducescatter, nothing for one": scatter(total, rows=1, op=hvd.Sum),
    "grouped reducescatter sum": Row(
        lambda own: hvd.grouped_reducescatter(own, op=hvd.Sum),
        scattered(total),
        lambda rank: [(4, 3), (4,)],
    ),
}
MOVES = {
    name: row
    for name, row in INTEGERS.items()
    if any(kind in name for kind in ("allgather", "broadcast", "alltoall"))
}


def cut_off(factor: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """Whole numbers times a factor, as Horovod has it: in float64, the fraction dropped."""
    return lambda t: tf.cast(tf.cast(t, tf.float64) * factor, t.dtype)


WHOLE_NUMBERS = INTEGERS | {
    "allreduce average": reduced(lambda t: cut_off(1 / len(t))(total(t))),
    "allreduce prescaled": reduced(
        lambda t: total(cut_off(0.5)(t)), op=hvd.Sum, prescale_factor=0.5
    ),
    "grouped allreduce postscaled": grouped(
        lambda t: cut_off(0.5)(total(t)), op=hvd.Sum, postscale_factor=0.5
    ),
    "reducescatter postscaled": scatter(
        lambda t: cut_off(0.5)(total(t)), op=hvd.Sum, postscale_factor=0.5
    ),
}
FLOATS = INTEGERS | {
    "allreduce average": reduced(mean),
    "allreduce scaled": reduced(
        lambda t: 1.5 * mean(t), prescale_factor=3.0, postscale_factor=0.5
    ),
    "allreduce min scaled": reduced(
        lambda t: tf.reduce_min(-2.0 * t, 0) * 0.5,
        op=hvd.Min,
        prescale_factor=-2.0,
        postscale_factor=0.5,
    ),
    "grouped allreduce": grouped(mean),
    "grouped allreduce scaled": grouped(
        lambda t: 1.5 * total(t), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5
    ),
    "grouped allreduce max": grouped(lambda t: tf.reduce_max(t, 0), op=hvd.Max),
    "reducescatter": scatter(mean),
    "reducescatter scaled": scatter(mean, factor=1.5, prescale_factor=3.0, postscale_factor=0.5),
    "grouped reducescatter scaled": Row(
        lambda own: hvd.grouped_reducescatter(own, prescale_factor=3.0, postscale_factor=0.5),
        scattered(mean, factor=1.5),
        lambda rank: [(4, 3), (4,)],
    ),
}  # fmt: skip
COMPRESSED = {
    "allreduce fp16": reduced(mean, compression=hvd.Compression.fp16),
    "allreduce bf16": reduced(mean, compression=hvd.Compression.bf16),
    "grouped allreduce fp16": grouped(mean, compression=hvd.Compression.fp16),
    "grouped allreduce bf16": grouped(total, op=hvd.Sum, compression=hvd.Compression.bf16),
    "reducescatter fp16": scatter(mean, compression=hvd.Compression.fp16),
}


def loss_of(rank: int, results: Any) -> tf.Tensor:
    """Another one on each rank, and not linear, so that no two factors meet."""
    flat = [tf.reduce_sum(tf.square(r)) for r in tf.nest.flatten(results)]
    return tf.add_n(flat) * tf.cast(rank + 1, flat[0].dtype) / 2


def gap(results: Any, wanted: Any) -> float:
    """The largest difference; inf for another shape or dtype."""
    pairs = zip(tf.nest.flatten(results), tf.nest.flatten(wanted), strict=True)
    apart = [0.0]
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        difference = tf.cast(one, tf.float64) - tf.cast(other, tf.float64)
        apart += np.abs(difference.numpy()).ravel().tolist()
    return max(apart)


def values_and_gradients(row: Row, graph: bool, dtype: str, dimensions: int) -> list[float]:
    """How far both are from those of one process."""
    everyone = [given(rank, row, dtype, dimensions) for rank in row.ranks]
    own = everyone[row.ranks.index(hvd.rank())]

    def step(*own: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(own)
            results = row.call(list(own))
            loss = loss_of(hvd.rank(), results)
        return results, tape.gradient(loss, own)

    results, gradients = (tf.function(step) if graph else step)(*own)
    with tf.GradientTape() as tape:
        tape.watch(everyone)
        wanted = row.whole(everyone)
        loss = tf.add_n([loss_of(r, one) for r, one in zip(row.ranks, wanted, strict=True)])
    theirs = tape.gradient(loss, everyone, unconnected_gradients="zero")
    mine = row.ranks.index(hvd.rank())
    return [gap(results, wanted[mine]), gap(gradients, theirs[mine])]


def case_values_and_gradients() -> dict[str, list[float]]:
    ways = [
        (False, "float32", 2),
        (True, "float32", 2),
        (False, "float64", 1),
        (False, "float64", 3),
    ]
    return {
        f"{name}, {way}": values_and_gradients(row, *way)
        for name, row in (FLOATS | COMPRESSED).items()
        for way in ways
    }


def rows_of(dtype: str) -> dict[str, Row]:
    """The collectives that Horovod has for `dtype`."""
    if dtype in ONLY_MOVED:
        return MOVES
    rows = FLOATS if tf.as_dtype(dtype).is_floating else WHOLE_NUMBERS
    lacking = "reducescatter" if dtype in ("uint8", "int8") else "nothing"
    return {name: row for name, row in rows.items() if lacking not in name}


def case_dtypes_and_dimensions() -> dict[str, float]:
    """Eagerly one after the other, and in a tf.function all of them at the same time."""
    found = {}
    dtypes = (*EVERY_DTYPE, *ONLY_MOVED)
    # Tracing takes the time: one number of dimensions does.
    ways = [*((False, dimensions) for dimensions in DIMENSIONS), (True, 3)]
    for dtype, (graph, dimensions) in itertools.product(dtypes, ways):
        rows = rows_of(dtype)
        everyone = {
            name: [given(rank, row, dtype, dimensions) for rank in RANKS]
            for name, row in rows.items()
        }

        def step(own: dict[str, Tensors], rows: dict[str, Row] = rows) -> dict[str, Any]:
            return {name: row.call(own[name]) for name, row in rows.items()}

        own = {name: values[hvd.rank()] for name, values in everyone.items()}
        results = (tf.function(step, autograph=False) if graph else step)(own)
        for name, row in rows.items():
            wanted = row.whole(everyone[name])[hvd.rank()]
            found[f"{name}, {dtype}, {dimensions}, {graph}"] = gap(results[name], wanted)
    return found


def case_contrastive_loss() -> dict[str, float]:
    """Each rank's examples against those of all: with the tape's average, the gradient of one process's mean loss."""
    x = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
    w = tf.Variable(np.random.default_rng(2).normal(size=(3, 2)).astype("float32"))

    def loss_of_anchors(anchors: tf.Tensor, everyone: tf.Tensor) -> tf.Tensor:
        alike = tf.matmul(anchors, everyone, transpose_b=True)
        return tf.reduce_mean(tf.reduce_logsumexp(alike, axis=1) - tf.reduce_max(alike, axis=1))

    def distributed() -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            own = tf.constant(x[hvd.rank() :: hvd.size()]) @ w
            loss = loss_of_anchors(own, hvd.allgather(own))
        return tape.gradient(loss, [w])[0]

    with tf.GradientTape() as tape:
        whole = tf.constant(x) @ w
        loss = loss_of_anchors(whole, whole)
    wanted = tape.gradient(loss, w)
    return {"eager": gap(distributed(), wanted), "graph": gap(tf.function(distributed)(), wanted)}


def case_gradient_of_a_gradient() -> list[float]:
    """L = sum over the ranks of y^3, y = the sum of x: its second derivative, summed over both, is 24 y."""
    x = tf.constant([1.0 + hvd.rank()])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            cube = hvd.allreduce(x, op=hvd.Sum) ** 3
        first = inner.gradient(cube, x)
    return [float(first[0]), float(outer.gradient(first, x)[0])]


def case_sparse_and_mixed() -> dict[str, Any]:
    rank = hvd.rank()
    slices = tf.IndexedSlices(
        tf.fill([1 + rank, 2], 1.0 + rank), tf.range(1 + rank), tf.constant([3, 2])
    )

    @tf.function
    def all_kinds() -> Any:
        tensors = [tf.constant([1.0]), tf.constant([2]), tf.constant([3.0]), slices]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    one = hvd.allreduce(slices, prescale_factor=4.0)
    *dense, sparse = all_kinds()
    return {
        "sum of slices": tf.convert_to_tensor(sparse).numpy().tolist(),
        "mean of slices": [one.values.numpy().tolist(), one.indices.numpy().tolist()],
        "a group of all kinds": [t.numpy().tolist() for t in dense],
        "an empty group": hvd.grouped_allreduce([]) + hvd.grouped_allgather([]),
        "received splits": hvd.alltoall([[1.0], [2.0]], [1, 1])[1].numpy().tolist(),
    }


def case_queries() -> list[Any]:
    found = [hvd.rank_op(), hvd.local_rank_op(), hvd.size_op(), hvd.local_size_op()]
    known = [hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size()]
    return [
        [int(f) for f in found] == known,
        int(hvd.process_set_included_op()),
        hvd.is_homogeneous(),
    ]


def case_process_sets() -> dict[str, Any]:
    """Each rank is a set of its own: all collectives give back what they were given."""
    sets = [hvd.add_process_set([rank]) for rank in RANKS]
    mine, other = sets[hvd.rank()], sets[1 - hvd.rank()]
    x = tf.constant([[1.0 + hvd.rank()], [2.0]])
    options: dict[str, Any] = {"process_set": mine}
    calls: dict[str, Callable[[tf.Tensor], Any]] = {
        "allreduce": lambda x: hvd.allreduce(x, **options),
        "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x], **options)[1],
        "bf16": lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16, **options),
        "max": lambda x: hvd.allreduce(x, op=hvd.Max, **options),
        "allgather": lambda x: hvd.allgather(x, **options),
        "grouped_allgather": lambda x: hvd.grouped_allgather([x, x], **options)[1],
        "broadcast": lambda x: hvd.broadcast(x, hvd.rank(), **options),
        "alltoall": lambda x: hvd.alltoall(x, **options),
        "reducescatter": lambda x: hvd.reducescatter(x, **options),
        "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x, x], **options)[1],
    }
    found: dict[str, Any] = {}
    for (name, call), graph in itertools.product(calls.items(), (False, True)):

        def step(x: tf.Tensor, call: Any = call) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
                loss = tf.reduce_sum(y**2)
            return [y, tape.gradient(loss, x)]

        found[f"{name}, {graph}"] = gap((tf.function(step) if graph else step)(x), [x, 2 * x])
    found["root outside"] = error_of(lambda: hvd.broadcast(x, 1 - hvd.rank(), **options))
    found["included"] = [mine.included(), other.included(), mine.rank(), mine.size()]
    found["not included"] = error_of(lambda: hvd.allreduce(x, process_set=other))
    found["removed"] = [hvd.remove_process_set(one) for one in sets]
    return found


def error_of(call: Callable[[], Any]) -> str:
    try:
        return f"no error, {call()}"
    except (tf.errors.OpError, UsageError) as error:
        return f"{type(error).__name__}: {error}"


def case_errors() -> dict[str, str]:
    """On both ranks, and the job goes on."""
    rank = hvd.rank()
    rows = tf.ones([2 + rank, 2])
    folded = tf.ones([[2, 6], [2, 2, 3]][rank])
    other_dtype = tf.ones([2], ["int32", "float32"][rank])
    other_float = ["float64", "float32"][rank]
    equal = [tf.ones([3]), tf.ones([4])]

    def gradients(values: list[tf.Tensor], **options: Any) -> Any:
        variables = [tf.Variable(value) for value in values]
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.add_n(
                [tf.cast(tf.reduce_sum(variable), tf.float32) for variable in variables]
            )
        return tape.gradient(loss, variables)

    shapes_and_dtypes: dict[str, Callable[[], Any]] = {
        "allreduce shape": lambda: hvd.allreduce(rows),
        "allreduce dimensions": lambda: hvd.allreduce(folded),
        "allreduce dtype": lambda: hvd.allreduce(other_dtype),
        "grouped allreduce shape": lambda: hvd.grouped_allreduce([rows, rows]),
        # Horovod's own grouped operations return uninitialized memory for these.
        "grouped allreduce, a shape": lambda: hvd.grouped_allreduce([rows, *equal]),
        "grouped allgather, a shape": lambda: hvd.grouped_allgather([tf.transpose(rows), *equal]),
        "grouped reducescatter, a shape": lambda: hvd.grouped_reducescatter([rows, *equal]),
        "grouped allreduce, equal sums": lambda: hvd.grouped_allreduce([folded, *equal]),
        "gradients, equal sums": lambda: gradients(equal if rank else equal[::-1]),
        "gradients, a dtype": lambda: gradients([tf.ones([2], other_float), *equal]),
        "gradients, a shape": lambda: gradients([rows, *equal]),
        "groups of gradients, a shape": lambda: gradients([rows, *equal], groups=1),
        "grouped allreduce dtype": lambda: hvd.grouped_allreduce([other_dtype, other_dtype]),
        "allgather shape": lambda: hvd.allgather(tf.transpose(rows)),
        "allgather dtype": lambda: hvd.allgather(other_dtype),
        "grouped allgather shape": lambda: hvd.grouped_allgather([tf.transpose(rows)] * 2),
        "broadcast shape": lambda: hvd.broadcast(rows, 0),
        "broadcast dtype": lambda: hvd.broadcast(other_dtype, 0),
        "broadcast root": lambda: hvd.broadcast([1.0], rank),
        "reducescatter shape": lambda: hvd.reducescatter(rows),
        "reducescatter dimensions": lambda: hvd.reducescatter(folded),
        "reducescatter dtype": lambda: hvd.reducescatter(other_dtype),
        "grouped reducescatter dtype": lambda: hvd.grouped_reducescatter([other_dtype] * 2),
        "alltoall shape": lambda: hvd.alltoall(tf.ones([2, 2 + rank])),
        "alltoall dtype": lambda: hvd.alltoall(other_dtype),
        "alltoall splits": lambda: hvd.alltoall(tf.ones([2, 1]), [2, 1]),
        "alltoall number of splits": lambda: hvd.alltoall(tf.ones([2, 1]), [1, 1, 0]),
        "reducescatter uint8": lambda: hvd.reducescatter(tf.ones([2], "uint8")),
    }
    found = {f"{name}, eager": error_of(call) for name, call in shapes_and_dtypes.items()}
    graphs = ("allreduce shape", "grouped allreduce dtype", "broadcast root", "alltoall shape")
    for name in (*graphs, "grouped allreduce, equal sums"):
        found[f"{name}, graph"] = error_of(tf.function(shapes_and_dtypes[name]))
    found["afterwards"] = str(float(hvd.allreduce(1.0, op=hvd.Sum)))
    return found


def case_usage_errors() -> list[str]:
    """Return the calls that are not refused before anything travels."""
    slices = tf.IndexedSlices(tf.ones([1, 1]), [0])
    dense = tf.ones([1])
    calls: dict[str, Callable[[], Any]] = {
        "alltoall rows": lambda: hvd.alltoall(tf.ones([3, 1])),
        "alltoall scalar": lambda: hvd.alltoall(1.0),
        "allgather scalar": lambda: hvd.allgather(1.0),
        "grouped allgather scalar": lambda: hvd.grouped_allgather([dense, 1.0]),
        "reducescatter max": lambda: hvd.reducescatter(tf.ones([2, 1]), op=hvd.Max),
        "reducescatter scalar": lambda: hvd.reducescatter(1.0),
        "grouped reducescatter scalar": lambda: hvd.grouped_reducescatter([dense, 1.0]),
    }
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        calls |= {
            f"slices {op}": lambda op=op: hvd.allreduce(slices, op=op),
            f"group of slices {op}": lambda op=op: hvd.grouped_allreduce([slices] * 2, op=op),
            f"slices first {op}": lambda op=op: hvd.grouped_allreduce([slices, dense], op=op),
            f"slices last {op}": lambda op=op: hvd.grouped_allreduce([dense, slices], op=op),
        }
    said = {name: error_of(call) for name, call in calls.items()}
    late = tf.function(hvd.alltoall, [tf.TensorSpec([None, 1])])
    # TensorFlow raises what a graph finds out.
    known_late = error_of(lambda: late(tf.ones([3, 1])))
    wrong = [name for name, error in said.items() if not error.startswith("UsageError")]
    return wrong if "divided evenly" in known_late else [*wrong, known_late]
