"""Measures the pipeline's bubble: s stages on one core each, against one stage on one core, in the same micro-batches.

With m micro-batches and stages of equal work, 1F1B takes (m + s - 1) / m of the ideal time of s cores that never wait
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). The ideal is the step time of one core, which runs the same
program with a single stage, divided by s. Cores that share memory are slower when all of them work, so this is also
measured with s such programs at once, which do not know of each other: no pipeline can be faster than
(m + s - 1) / m times that.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.bench.measurement import (
    Comparison,
    Launch,
    at_once,
    report,
    run_measurement,
    take_core,
)

ROUNDS = 3
SECONDS = 0.7
"""Target duration of one timed round."""


@dataclass(frozen=True)
class Bubble(Comparison):
    """Seconds per step in one pass: ideal (`reference`) and `measured`.

    Attributes:
        together: The ideal if all cores work at once.
    """

    together: float

    @property
    def of_machine(self) -> float:
        """`measured` / `together`."""
        return self.measured / self.together


def measure_bubble(
    counts: Sequence[int],
    stages: int,
    width: int,
    batch_size: int,
    passes: int,
    launch: Launch,
) -> Iterator[dict[int, Bubble]]:
    """Yield the seconds per step of each pass by number of micro-batches.

    Args:
        counts: Numbers of micro-batches.
        stages: Number of pipeline stages, of four dense layers each.
        width: Width of the layers.
        batch_size: Number of examples per step.
        passes: Number of passes.
        launch: See `measurement.Launch`.

    Raises:
        EngineError: If a measurement failed.
    """
    options = {
        "counts": list(counts),
        "layers": 4 * stages,
        "width": width,
        "batch_size": batch_size,
    }

    def seconds(ranks: int, core: int = 0) -> list[float]:
        found = run_measurement(launch, ranks, Path(__file__), {**options, "core": core})
        return [statistics.median(rounds) for rounds in found["seconds"]]

    for _ in range(passes):
        alone = seconds(1)
        apart = zip(*at_once(lambda core: seconds(1, core), stages), strict=True)
        yield {
            count: Bubble(one / stages, measured, max(several) / stages)
            for count, one, measured, several in zip(
                counts, alone, seconds(stages), apart, strict=True
            )
        }


def theory(micro_batches: int, stages: int) -> float:
    """Return the ratio of measured to ideal time, for stages of equal work and instant messages."""
    return (micro_batches + stages - 1) / micro_batches


def time_stage(
    counts: Sequence[int], layers: int, width: int, batch_size: int, core: int
) -> dict[str, list[list[float]]] | None:
    """Time the steps of one stage, on the core of this number or, of several stages, on the rank's.

    Rank 0 returns the seconds per step of each round, for each of `counts`.
    """
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.rank_variables import size_of
    from hvdtrain.runtime import init, load_horovod

    stages = size_of(os.environ)
    rank = init(mesh=Mesh(pipeline=stages))
    take_core(rank.local_rank + core)
    seconds = [
        _time(_step(stages, count, layers, width, batch_size), load_horovod()) for count in counts
    ]
    return {"seconds": seconds} if rank.is_first else None


def _step(stages: int, count: int, layers: int, width: int, batch_size: int) -> Callable[[], Any]:
    """Return a function that trains one step."""
    import keras
    import numpy as np
    import tensorflow as tf

    from hvdtrain import Layout, Mesh, Trainer
    from hvdtrain.data import Share
    from hvdtrain.parallel.pipeline.stage_runner import StageRunner
    from hvdtrain.parallel.whole_file import DividedState
    from hvdtrain.strategies.horovod import HorovodStrategy

    def make() -> keras.Model:
        dense = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
        return keras.Sequential([keras.layers.Input((width,)), *dense])

    layout = Layout(Mesh(pipeline=stages), micro_batches=count)
    trainer = Trainer(
        make,
        keras.optimizers.SGD(1e-3),
        "mse",
        global_batch_size=batch_size,
        strategy=HorovodStrategy(layout.mesh, partial(StageRunner, layout), DividedState),
        guard=False,
    )
    x = np.random.default_rng(0).random((batch_size, width), "float32")
    trainer.fit(x, x, verbose=0)
    steps = trainer.steps
    assert steps is not None
    share = Share((tf.constant(x), tf.constant(x)), batch_size, batch_size, 0, None)
    return lambda: steps.train([share])


def _time(step: Callable[[], Any], hvd: Any) -> list[float]:
    """Warm up, then return the seconds per step of each round; all ranks run the same number of steps."""
    import tensorflow as tf

    step()
    begin = time.perf_counter()
    step()
    wanted = max(2, round(SECONDS / (time.perf_counter() - begin)))
    count = int(hvd.broadcast(tf.constant(wanted), 0, name="bench_steps"))
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            step()
        found.append((time.perf_counter() - begin) / count)
    # Wait for all stages: the first to exit would shut Horovod down.
    hvd.allreduce(tf.constant(0.0), name="bench_end")
    return found


if __name__ == "__main__":
    report(time_stage)
