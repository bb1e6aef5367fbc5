"""What every communicator must do, against NumPy: called by all its ranks, whether those are threads or Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator, Max, Min, Sum

ADDED = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16")
ADDED += ("complex64", "complex128")
SCATTERED = ("int32", "int64", "float16", "float32", "float64", "bfloat16")
MOVED = (*ADDED, "bool", "int16", "uint16", "uint32", "uint64")
MOVED += ("float8_e4m3fn", "float8_e5m2")

Check = tuple[str, Callable[[Any], Any], np.ndarray, Any]
"""What is checked, the collective as a function of this rank's value, that value, and what must come back."""


def value_of(rank: int, dtype: str, rows: int) -> np.ndarray:
    """Small numbers, exact in every dtype and in sums of a few ranks."""
    numbers = (np.arange(2 * rows).reshape(rows, 2) + 3 * rank) % 8
    if dtype == "bool":
        return numbers % 3 == 0
    if dtype.startswith("complex"):
        return (numbers + 1j * rank).astype(dtype)
    return numbers.astype(getattr(ml_dtypes, dtype, dtype))


def moves(ranks: Communicator, dtype: str) -> Iterator[Check]:
    """Collectives that compute nothing."""
    me, size = ranks.rank(), ranks.size()
    uneven = [value_of(rank, dtype, rank) for rank in range(size)]  # nothing from the first
    even = [value_of(rank, dtype, 3) for rank in range(size)]
    yield "allgather", lambda x: ranks.allgather(x, "g"), uneven[me], np.concatenate(uneven)
    last = size - 1
    yield "broadcast", lambda x: ranks.broadcast(x, ranks.ranks[last], "b"), even[me], even[last]
    scalars = [value[0, 1] for value in even]
    yield "scalar", lambda x: ranks.broadcast(x, ranks.ranks[0], "s"), scalars[me], scalars[0]
    splits = np.arange(size, dtype="int32")  # one row more to each rank
    ends = np.cumsum(splits)
    rows = [value_of(rank, dtype, int(ends[-1])) for rank in range(size)]
    received = [value[ends[me] - splits[me] : ends[me]] for value in rows]
    yield "alltoall", lambda x: ranks.alltoall(x, splits, "a"), rows[me], np.concatenate(received)


def sums(ranks: Communicator, dtype: str) -> Iterator[Check]:
    """Collectives that compute."""
    me, size = ranks.rank(), ranks.size()
    values = [value_of(rank, dtype, 3) for rank in range(size)]
    total = np.sum(np.stack(values), axis=0, dtype=values[0].dtype)
    cases = {"sum": (Sum, total), "min": (Min, np.min(values, 0)), "max": (Max, np.max(values, 0))}
    for name, (op, wanted) in cases.items():
        if name != "sum" and dtype.startswith("complex"):
            continue  # They have no order.
        yield name, lambda x, op=op: ranks.allreduce(x, "r", op), values[me], wanted
    scaled = (total * 4).astype(total.dtype)
    yield (
        "scaled",
        lambda x: ranks.allreduce(x, "f", prescale_factor=2.0, postscale_factor=2.0),
        values[me],
        scaled,
    )
    both = np.stack([total, total])
    yield "group", lambda x: tf.stack(ranks.grouped_allreduce([x, x], "n")), values[me], both
    yield "scalar sum", lambda x: ranks.allreduce(x, "o"), values[me][0, 1], total[0, 1]
    if dtype in SCATTERED:
        part = np.array_split(total, size)[me]
        yield "scatter", lambda x: ranks.reducescatter(x, "c"), values[me], part
        doubled = (part * 2).astype(part.dtype)
        yield (
            "scatter scaled",
            lambda x: ranks.reducescatter(x, "c", postscale_factor=2.0),
            values[me],
            doubled,
        )
    if "float" in dtype or "complex" in dtype:
        mean = [value_of(2 * rank, dtype, 3) for rank in range(size)]
        wide = "complex128" if "complex" in dtype else "float64"
        average = np.mean(np.stack(mean).astype(wide), axis=0).astype(values[0].dtype)
        yield "average", lambda x: ranks.allreduce(x, "m", Average), mean[me], average


def wrong(ranks: Communicator) -> list[str]:
    """Return what did not come back as it must: eagerly, from a traced function, and there of constants."""
    found = []
    for dtype in MOVED:
        checks = [*moves(ranks, dtype), *(sums(ranks, dtype) if dtype in ADDED else ())]
        names, collectives, mine, wanted = zip(*checks, strict=True)

        def run(values: Any, collectives: Any = collectives) -> list[Any]:
            return [call(value) for call, value in zip(collectives, values, strict=True)]

        tensors = [tf.constant(value) for value in mine]
        ways = {
            "eager": run(tensors),
            "traced": tf.function(run)(tensors),
            "constant": tf.function(lambda run=run, mine=mine: run(mine))(),
        }
        for way, results in ways.items():
            for name, got, right in zip(names, results, wanted, strict=True):
                same = got.dtype == tensors[0].dtype and got.shape == np.shape(right)
                if not same or got.numpy().tobytes() != np.asarray(right).tobytes():
                    found.append(f"{name} of {dtype}, {way}: {got} where {right} is right")
    return found


def of_constants(ranks: Communicator) -> list[float]:
    """Return what two calls of one traced function give, where the first rank's part is a constant.

    A graph optimiser that takes the first rank's collective for a constant leaves the others alone in the second.
    """

    @tf.function
    def step(mine: tf.Tensor) -> tf.Tensor:
        mine = tf.constant([1.0]) if ranks.rank() == 0 else mine
        # One name twice: both may run at the same time.
        return ranks.allreduce(mine, "twice") + ranks.allgather(10 * mine, "twice")[-1]

    return [float(step(tf.constant([number]))[0]) for number in (1.0, 2.0)]
