"""Measures scaling: N ranks of one core each against plain Keras on one core, in turns.

Each pass is a turn of each job, so that its ratios hardly depend on the machine's varying speed; the result is the
median over the passes. Scaling is (examples per second of N ranks) / (N x examples per second of one plain process): 1
is perfect.

Three bounds are measured, too. Cores share memory, so N independent plain processes at once do not reach 1 ("apart").
Synchronous training waits in each step for the slowest rank: if those processes had waited for each other, each step
would have taken the longest of their times ("in step"). And the gradients have to be exchanged: "raw" is plain Keras on
each rank, with one allreduce of as many bytes after each step, by MPI itself or, for Gloo, through TCP sockets without
adding anything up. Horovod only connects these processes, and has ended before they train.

A process trains in one of several ways. `plain` is Keras alone, without Horovod in the process. `mpi` and `tcp` are
"raw". `bare` only calls hvd.allreduce on each gradient. `keras` is hvdtrain.keras.DistributedOptimizer in Keras's own
training step. `trainer` is the Trainer's step with its data path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from hvdtrain.bench.bandwidth import Raw, raw_collectives
from hvdtrain.bench.measurement import Launch, take_core
from hvdtrain.bench.turns import Job, Training, Turn, in_turns, keep_mpi, serve, take_turns

EPOCH = 20
"""Number of batches in an epoch of the Trainer."""


@dataclass(frozen=True)
class Pass:
    """Examples per second in one pass.

    Attributes:
        plain: Rate of plain Keras on one core.
        apart: Rate of `size` independent plain processes at once, together.
        in_step: Rate of these processes if each step took as long as the slowest of them needed.
        raw: Rate of all ranks together with the exchange of what Horovod runs on.
        ranks: Rate of all ranks together.
        size: Number of ranks.
    """

    plain: float
    apart: float
    in_step: float
    raw: float
    ranks: float
    size: int

    def scaling(self, rate: float) -> float:
        """Return `rate` as a fraction of the perfect speed-up."""
        return rate / (self.size * self.plain)


def measure(
    model: str, batch_size: int, way: str, passes: int, size: int, raw: Raw, launch: Launch
) -> Iterator[Pass]:
    """Yield the rates of each pass.

    Raises:
        EngineError: If a measurement failed.
    """
    options = {"name": model, "batch_size": batch_size}
    with in_turns() as start:

        def job(np: int, way: str, core: int = 0) -> Job:
            return start(launch, np, Path(__file__), {**options, "way": way, "core": core})

        plain = [job(1, "plain", core) for core in range(size)]
        exchanging, ranks = job(size, raw), job(size, way)
        for _ in range(passes):
            (alone,) = take_turns(plain[0])
            apart = take_turns(*plain)
            (exchange,), (together,) = take_turns(exchanging), take_turns(ranks)
            yield Pass(
                plain=alone.rate,
                apart=sum(one.rate for one in apart),
                in_step=in_step(apart).rate,
                raw=exchange.rate,
                ranks=together.rate,
                size=size,
            )


def in_step(apart: Sequence[Turn]) -> Turn:
    """Return the turn of processes that would have waited for the slowest of them in each step."""
    seconds = tuple(map(max, zip(*(one.seconds for one in apart), strict=True)))
    return Turn(seconds, sum(one.examples for one in apart))


def build(way: str, name: str, batch_size: int, core: int = 0) -> Training:
    """Build what a rank, or a plain process on the core with this index, trains in one of the ways of the module."""
    if way == "plain":
        take_core(core)
        return Training(training_step(way, name, batch_size, 0, 1), 0, batch_size)
    keep_mpi()
    import horovod.tensorflow as hvd

    from hvdtrain.runtime import init

    start = init if way in ("keras", "trainer") else hvd.init
    start()
    rank, size = hvd.rank(), hvd.size()
    take_core(hvd.local_rank())
    step = training_step(way, name, batch_size, rank, size)
    if way in get_args(Raw):
        return Training(step, rank, batch_size * size)
    return Training(step, rank, batch_size * size, resume=start, pause=hvd.shutdown)


def training_step(
    way: str, name: str, batch_size: int, rank: int, size: int
) -> Callable[[], float]:
    """Return a function that trains one step and returns the loss; for "mpi" and "tcp" it shuts Horovod down."""
    import keras
    import tensorflow as tf

    from hvdtrain.bench.networks import MODELS, examples, loss

    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    # The Trainer gets the examples of all ranks, the same on each rank.
    seed, copies = (0, size) if way == "trainer" else (rank, 1)
    x, y = examples(model, batch_size * copies, seed)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if way == "trainer":
        return _trainer_step(model, optimizer, loss(), x, y)
    if way == "bare":
        optimizer = _bare(keras.optimizers.SGD)(0.01, momentum=0.9)
    if way == "keras":
        from hvdtrain.keras import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer)
    model.compile(optimizer, loss(), jit_compile=False)
    model.make_train_function()
    batches = itertools.repeat((tf.constant(x), tf.constant(y)))

    def step() -> float:
        return float(model.train_function(batches)["loss"])

    return _with_raw_exchange(step, model, cast(Raw, way)) if way in get_args(Raw) else step


def _with_raw_exchange(step: Callable[[], float], model: Any, raw: Raw) -> Callable[[], float]:
    """Return `step` with an exchange of as many bytes as the gradients have behind it, without Horovod."""
    import horovod.tensorflow as hvd

    values = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    exchange = raw_collectives(hvd, raw)("allreduce", -(-values // hvd.size()))
    hvd.shutdown()

    def both() -> float:
        loss = step()
        exchange(1)
        return loss

    return both


def _bare(plain: type) -> type:
    """Return an optimizer class that only averages gradients: the least that data parallelism needs on Keras 3."""
    import horovod.tensorflow as hvd

    class Bare(plain):
        def _clip_gradients(self, grads: Any) -> Any:
            return super()._clip_gradients(
                [hvd.allreduce(g, name=f"bare_{i}") for i, g in enumerate(grads)]
            )

    return Bare


def _trainer_step(model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> Callable[[], float]:
    """Return a function that trains a step of the Trainer, on epochs of `EPOCH` batches that its thread prefetches."""
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


if __name__ == "__main__":
    serve(build)
