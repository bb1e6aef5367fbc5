"""Times Horovod's collectives, in the same processes MPI's own or bare sockets, and copies in memory as a bound.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md). For S bytes in t seconds, the algorithm bandwidth is S / t.
The bus bandwidth, S / t times the part of S that each link of a ring carries, does not depend on the number of ranks. S
is the size of the larger side: the result of allgather, the input of reducescatter.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.bench.measurement import Launch, report, run_measurement
from hvdtrain.bench.sockets import Ring, ring_steps

SIZES = (*(4 * 16**power for power in range(7)), 256 * 2**20)
"""Sizes in bytes: 4 to 64 Mi, and 256 Mi."""
ROUND_SECONDS = 0.1
"""Target duration of one timed round."""
Raw = Literal["mpi", "tcp"]
"""What a collective is timed beside: MPI itself, or the same bytes through TCP sockets."""
RAW: dict[str, Raw] = {"mpi": "mpi", "gloo": "tcp"}
"""Controller -> what Horovod runs on."""
COPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Timing:
    """The times of one collective at one size; medians of several rounds.

    Attributes:
        name: Name of the collective, in COLLECTIVES.
        ranks: Number of ranks.
        bytes: Bytes of the larger side on each rank.
        horovod: Seconds per call of Horovod, in a loop in a tf.function.
        raw: Seconds per call of what Horovod runs on: MPI, on NumPy arrays, or for Gloo the bytes through TCP sockets.
        copy: Bytes per second of a copy in memory, in the same processes.
    """

    name: str
    ranks: int
    bytes: int
    horovod: float
    raw: float
    copy: float

    def bandwidth(self, seconds: float) -> float:
        """Return the algorithm bandwidth in bytes per second of a call that takes `seconds`."""
        return self.bytes / seconds

    def bus_bandwidth(self, seconds: float) -> float:
        """Return the bus bandwidth in bytes per second of a call that takes `seconds`."""
        return self.bandwidth(seconds) * ring_steps(self.name, self.ranks) / self.ranks


def measure_collectives(
    names: Sequence[str], sizes: Sequence[int], np: int, rounds: int, raw: Raw, launch: Launch
) -> Iterator[Timing]:
    """Yield the times of each collective, of COLLECTIVES, at each size.

    A size is the bytes of the larger side on each rank, rounded up to four bytes per rank. To time MPI beside Horovod
    (`raw`), MPI must have started the ranks.

    Raises:
        EngineError: If a measurement failed.
    """
    for name in names:
        options = {"name": name, "sizes": list(sizes), "rounds": rounds, "raw": raw}
        found = run_measurement(launch, np, Path(__file__), options)
        copy = statistics.median(found["copies"])
        for size, *seconds in zip(found["bytes"], found["horovod"], found["raw"], strict=True):
            horovod, beside = map(statistics.median, seconds)
            yield Timing(name, np, size, horovod, beside, copy)


def time_collective(
    name: str, sizes: Sequence[int], rounds: int, raw: Raw
) -> dict[str, Any] | None:
    """Time one collective; rank 0 returns the seconds per call in each round, for each size."""
    from hvdtrain.runtime import init, load_horovod

    rank = init()
    hvd = load_horovod()
    of_raw = raw_collectives(hvd, raw)
    found: dict[str, Any] = {"copies": _copies(rounds), "bytes": [], "horovod": [], "raw": []}
    for wanted in sizes:
        each = -(-wanted // (4 * rank.size))
        timed = _timed(hvd, [_of_horovod(hvd, name, each), of_raw(name, each)], rounds)
        found["bytes"].append(4 * each * rank.size)
        found["horovod"].append(timed[0])
        found["raw"].append(timed[1])
    return found if rank.is_first else None


_Repeated = Callable[[int], Any]
"""Calls a collective as many times as its argument says."""


def raw_collectives(hvd: Any, raw: Raw) -> Callable[[str, int], _Repeated]:
    """Return a function that returns the calls of what Horovod runs on. A collective.

    Its arguments are the name of a collective, and the number of float32 values of a rank's part, as in `_of_horovod`.
    """
    if raw == "mpi":
        return functools.partial(_of_mpi, ranks=hvd.size())
    gather = functools.partial(hvd.allgather_object, name="bench_ports")
    ring = Ring.connect(hvd.rank(), hvd.size(), gather)
    return lambda name, each: ring.calls(name, 4 * each)


def _of_horovod(hvd: Any, name: str, each: int) -> _Repeated:
    """Return the calls of Horovod's collective.

    A rank's part has `each` float32 values; the larger side has a part for each rank.
    """
    import tensorflow as tf

    size = each if name == "allgather" else each * hvd.size()
    values = tf.Variable(tf.ones(size))
    arguments = {
        "allreduce": {"op": hvd.Sum},
        "reducescatter": {"op": hvd.Sum},
        "broadcast": {"root_rank": 0},
    }
    collective = getattr(hvd, name)

    @tf.function
    def call(count: tf.Tensor) -> tf.Tensor:
        last = tf.constant(0.0)
        for _ in tf.range(count):
            with tf.control_dependencies([last]):
                result = collective(
                    tf.identity(values), name=f"bench_{name}_{size}", **arguments.get(name, {})
                )
            last = result[0]
        return last

    return lambda count: call(tf.constant(count)).numpy()


def _of_mpi(name: str, each: int, ranks: int) -> _Repeated:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part, whole, other = (np.ones(each * many, "float32") for many in (1, ranks, ranks))
    call: Callable[[], None] = {
        "allreduce": lambda: world.Allreduce(whole, other),
        "allgather": lambda: world.Allgather(part, whole),
        "reducescatter": lambda: world.Reduce_scatter_block(whole, part),
        "broadcast": lambda: world.Bcast(whole, 0),
        "alltoall": lambda: world.Alltoall(whole, other),
    }[name]

    def calls(count: int) -> None:
        for _ in range(count):
            call()

    return calls


def _timed(hvd: Any, several: Sequence[_Repeated], rounds: int) -> list[list[float]]:
    """Return the seconds per call in each round, for each of `several` in turn; all ranks make as many calls."""
    import tensorflow as tf

    counts = []
    for number, calls in enumerate(several):
        calls(1)
        begin = time.perf_counter()
        calls(2)
        wanted = max(1, min(1000, round(2 * ROUND_SECONDS / (time.perf_counter() - begin))))
        counts.append(int(hvd.broadcast(tf.constant(wanted), 0, name=f"bench_count_{number}")))
    found: list[list[float]] = [[] for _ in several]
    for _ in range(rounds):
        for seconds, calls, count in zip(found, several, counts, strict=True):
            begin = time.perf_counter()
            calls(count)
            seconds.append((time.perf_counter() - begin) / count)
    return found


def _copies(rounds: int) -> list[float]:
    """Return the bytes per second of copying an array, in each round."""
    import numpy as np

    source, target = np.ones(COPY_BYTES, "uint8"), np.zeros(COPY_BYTES, "uint8")
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        np.copyto(target, source)
        found.append(COPY_BYTES / (time.perf_counter() - begin))
    return found


if __name__ == "__main__":
    report(time_collective)
