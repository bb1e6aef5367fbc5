"""Measures the pipeline's bubble: s stages on one core each, in turns with one stage on one core.

With m micro-batches and stages of equal work, 1F1B takes (m + s - 1) / m of the ideal time of s cores that never wait
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). The ideal is the step time of one core, which runs the same
program with a single stage, divided by s. Cores that share memory are slower when all of them work, and TensorFlow
takes as long to call a few layers as many. So the time of s stages without neighbours is measured, too: each trains its
share of the layers by itself, on its core, all at once. No pipeline can be faster than (m + s - 1) / m times that. All
compute the same micro-batches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.bench.measurement import Comparison, Launch, take_core
from hvdtrain.bench.turns import Job, Training, end, in_turns, keep_mpi, serve, take_turns

LAYERS = 4
"""Number of layers of a stage."""


@dataclass(frozen=True)
class Bubble(Comparison):
    """Seconds per step in one pass: ideal (`reference`) and `measured`.

    Attributes:
        apart: That of the slowest of the stages without neighbours, all at once.
    """

    apart: float

    @property
    def of_stages(self) -> float:
        """`measured` / `apart`."""
        return self.measured / self.apart


def measure_bubble(
    counts: Sequence[int],
    stages: int,
    width: int,
    batch_size: int,
    passes: int,
    launch: Launch,
) -> Iterator[tuple[int, list[Bubble]]]:
    """Yield the seconds per step in each pass, for each number of micro-batches.

    Raises:
        EngineError: If a measurement failed.
    """
    options = {"width": width, "batch_size": batch_size}
    with in_turns() as start:

        def job(ranks: int, count: int, layers: int, core: int = 0) -> Job:
            given = {**options, "count": count, "layers": layers, "core": core}
            return start(launch, ranks, Path(__file__), given)

        for count in counts:
            whole, pipeline = (job(ranks, count, LAYERS * stages) for ranks in (1, stages))
            apart = [job(1, count, LAYERS, core) for core in range(stages)]
            yield count, [_bubble(whole, apart, pipeline) for _ in range(passes)]
            end((whole, *apart, pipeline))


def _bubble(whole: Job, apart: Sequence[Job], pipeline: Job) -> Bubble:
    (ideal,), (measured,) = take_turns(whole), take_turns(pipeline)
    slowest = max(turn.step_seconds for turn in take_turns(*apart))
    return Bubble(ideal.step_seconds / len(apart), measured.step_seconds, slowest)


def theory(micro_batches: int, stages: int) -> float:
    """Return the ratio of measured to ideal time, for stages of equal work and instant messages."""
    return (micro_batches + stages - 1) / micro_batches


def build(count: int, layers: int, width: int, batch_size: int, core: int) -> Training:
    """Build what one stage trains, in `count` micro-batches.

    Of a stage without neighbours, `core` is the index of its core among those that it may use.
    """
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.rank_variables import size_of
    from hvdtrain.runtime import init, shutdown

    keep_mpi()
    stages = size_of(os.environ)
    start = partial(init, mesh=Mesh(pipeline=stages))
    rank = start()
    take_core(rank.local_rank + core)
    step = _step(stages, count, layers, width, batch_size)
    return Training(step, rank.rank, batch_size, resume=start, pause=shutdown)


def _step(stages: int, count: int, layers: int, width: int, batch_size: int) -> Callable[[], float]:
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

    def step() -> float:
        steps.train([share])
        return math.nan  # Only the last stage knows the loss.

    return step


if __name__ == "__main__":
    serve(build)
