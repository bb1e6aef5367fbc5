"""One stage of a timing of pipeline stages, on one core: equal dense layers, trained on data in memory.

Started by pipeline.py. Rank 0 reports {"seconds": {micro-batches: [one for each round]}}.
Run alone it is the one stage that does all the work, in as many micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.bench.core import take_core

ROUNDS = 3
SECONDS = 0.7
"""Aim of one timed round."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", required=True, help="numbers, with commas between")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True, help="file for rank 0's report")
    arguments = parser.parse_args()
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.rank_variables import size_of
    from hvdtrain.runtime import init, load_horovod

    stages = size_of(os.environ)
    rank = init(mesh=Mesh(pipeline=stages))
    take_core(rank.local_rank)
    seconds = {}
    for count in map(int, arguments.micro_batches.split(",")):
        step = _step(stages, count, arguments.layers, arguments.width, arguments.batch_size)
        seconds[count] = _time(step, load_horovod())
    if rank.is_first:
        arguments.report.write_text(json.dumps({"seconds": seconds}))


def _step(stages: int, count: int, layers: int, width: int, batch_size: int) -> Callable[[], Any]:
    """Return a function that trains one step."""
    import keras
    import numpy as np
    import tensorflow as tf

    from hvdtrain import Layout, Mesh, Trainer
    from hvdtrain.data import Share
    from hvdtrain.parallel.pipeline.runner import StageRunner
    from hvdtrain.parallel.saving import DividedState
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
    """Warm up, then return the seconds of a step in each round; all ranks take the same steps."""
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
    # The last stage is done first, and takes Horovod with it when it ends.
    hvd.allreduce(tf.constant(0.0), name="bench_end")
    return found


if __name__ == "__main__":
    main()
