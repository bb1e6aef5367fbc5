"""One rank of a timing: train a network on data in memory and report examples a second.

Started by scaling.py, which pins nothing: each rank takes the core of its local rank, one thread. Rank 0 reports
{"step_seconds": [[one for each step] for each round], "examples": of a step, "loss"}.

`plain` is Keras alone, without Horovod in the process; `bare` calls hvd.allreduce on each gradient and
nothing more; `keras` is hvdtrain.keras.DistributedOptimizer in Keras's own training step; `trainer` is the
Trainer's step with its data path.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.bench.core import take_core

SECONDS = 2.0
"""Aim of one timed round."""
EPOCH = 20
"""Batches in an epoch of the Trainer."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["plain", "bare", "keras", "trainer"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="examples a rank")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--core", type=int, default=0, help="of a plain process")
    parser.add_argument("--report", type=Path, required=True, help="file for rank 0's report")
    arguments = parser.parse_args()
    rank, size = _start(arguments.way, arguments.core)
    step = _step(arguments.way, arguments.model, arguments.batch_size, rank, size)
    rounds, loss = _time(step, arguments.rounds)
    if rank == 0:
        report = {"step_seconds": rounds, "examples": arguments.batch_size * size, "loss": loss}
        arguments.report.write_text(json.dumps(report))


def _start(way: str, core: int) -> tuple[int, int]:
    """Pin this process to one core and one thread; return rank and size."""
    if way == "plain":
        rank, size, local_rank = 0, 1, core
    elif way == "bare":
        import horovod.tensorflow as hvd

        hvd.init()
        rank, size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    else:
        from hvdtrain.runtime import init

        me = init()
        rank, size, local_rank = me.rank, me.size, me.local_rank
    take_core(local_rank)
    return rank, size


def _step(way: str, name: str, batch_size: int, rank: int, size: int) -> Callable[[], float]:
    """Return a function that trains one step and returns the loss."""
    import keras
    import numpy as np
    import tensorflow as tf

    from hvdtrain.bench.models import MODELS

    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    # The Trainer is given the examples of all ranks, the same on each.
    seed, copies = (0, size) if way == "trainer" else (rank, 1)
    random = np.random.default_rng(seed)
    x = random.random((batch_size * copies, *model.input_shape[1:]), "float32")
    y = random.integers(0, 10, len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if way == "trainer":
        return _trainer_step(model, optimizer, loss, x, y)
    if way == "bare":
        optimizer = _bare(keras.optimizers.SGD)(0.01, momentum=0.9)
    if way == "keras":
        from hvdtrain.keras import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer)
    model.compile(optimizer, loss, jit_compile=False)
    model.make_train_function()
    batch = (tf.constant(x), tf.constant(y))

    def forever() -> Any:
        while True:
            yield batch

    batches = forever()
    return lambda: float(model.train_function(batches)["loss"])


def _bare(plain: type) -> type:
    """The least that reduces gradients on Keras 3, to compare with."""
    import horovod.tensorflow as hvd

    class Bare(plain):
        def _clip_gradients(self, grads: Any) -> Any:
            return super()._clip_gradients(
                [hvd.allreduce(g, name=f"bare_{i}") for i, g in enumerate(grads)]
            )

    return Bare


def _trainer_step(model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> Callable[[], float]:
    """Train through the Trainer's own epochs of `EPOCH` batches, read ahead by its thread."""
    import itertools

    import numpy as np

    import hvdtrain
    from hvdtrain.data import make_source
    from hvdtrain.trainer.shares import epoch_shares

    trainer = hvdtrain.Trainer(model, optimizer, loss, global_batch_size=len(x))
    trainer.fit(x, y, epochs=1, verbose=0)
    data = [np.concatenate([part] * EPOCH) for part in (x, y)]
    source = make_source(*data, global_batch_size=len(x), shuffle=True, seed=0)
    shares = itertools.chain.from_iterable(
        epoch_shares(source, epoch, trainer.strategy.part) for epoch in itertools.count()
    )
    steps = trainer.steps
    assert steps is not None
    return lambda: float(steps.train([next(shares)])["loss"])


def _time(step: Callable[[], float], rounds: int) -> tuple[list[list[float]], float]:
    """Warm up, then time each step of `rounds` rounds of equally many; the ranks do the same number."""
    for _ in range(10):
        step()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    steps = _same_everywhere(max(5, round(SECONDS * 10 / (time.perf_counter() - begin))))
    loss = 0.0
    times: list[list[float]] = []
    for _ in range(rounds):
        times.append([])
        for _ in range(steps):
            begin = time.perf_counter()
            loss = step()
            times[-1].append(time.perf_counter() - begin)
    return times, loss


def _same_everywhere(steps: int) -> int:
    import sys

    if "horovod.tensorflow" not in sys.modules:
        return steps
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return int(hvd.broadcast(tf.constant(steps), 0, name="bench_steps"))


if __name__ == "__main__":
    main()
