"""Measures scaling: N ranks of one core each against plain Keras on one core, in turn.

The speed of shared machines varies, so each pass measures all of them one after the other, the ratios are taken within
a pass, and the result is the median over the passes. Scaling is (examples per second of N ranks) / (N x examples per
second of one plain process): 1 is perfect.

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
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from hvdtrain.bench.bandwidth import Raw, raw_collectives
from hvdtrain.bench.measurement import Launch, at_once, report, run_measurement, take_core

ROUNDS = 5
SECONDS = 2.0
"""Target duration of one timed round."""
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


@dataclass(frozen=True)
class Timing:
    """The times of a process's steps.

    Attributes:
        rounds: Seconds of each step, for each round.
        examples: Number of examples per step.
    """

    rounds: list[list[float]]
    examples: int

    @property
    def rate(self) -> float:
        """Median over the rounds of the examples per second."""
        return statistics.median(self.examples * len(steps) / sum(steps) for steps in self.rounds)


def measure(
    model: str, batch_size: int, way: str, passes: int, size: int, raw: Raw, launch: Launch
) -> Iterator[Pass]:
    """Yield the rates of each pass: one plain process, `size` plain processes at once, and `size` ranks, twice.

    Args:
        model: Name of a network in bench.networks.
        batch_size: Number of examples per rank.
        way: "keras", "trainer" or "bare".
        passes: Number of passes.
        size: Number of ranks.
        raw: What Horovod runs on.
        launch: See `measurement.Launch`.

    Raises:
        EngineError: If a measurement failed.
    """
    options = {"name": model, "batch_size": batch_size, "rounds": ROUNDS}

    def time_ranks(ranks: int, way: str, **more: int) -> Timing:
        found = run_measurement(launch, ranks, Path(__file__), {**options, "way": way, **more})
        return Timing(found["step_seconds"], found["examples"])

    for _ in range(passes):
        alone = time_ranks(1, "plain")
        apart = at_once(lambda core: time_ranks(1, "plain", core=core), size)
        yield Pass(
            plain=alone.rate,
            apart=sum(one.rate for one in apart),
            in_step=in_step(apart).rate,
            raw=time_ranks(size, raw, steps=len(alone.rounds[0])).rate,
            ranks=time_ranks(size, way).rate,
            size=size,
        )


def in_step(apart: Sequence[Timing]) -> Timing:
    """Return the times of processes that would have waited for the slowest of them in each step."""
    rounds = [
        [max(times) for times in zip(*steps, strict=False)]
        for steps in zip(*(one.rounds for one in apart), strict=True)
    ]
    return Timing(rounds, sum(one.examples for one in apart))


def time_training(
    way: str, name: str, batch_size: int, rounds: int, core: int = 0, steps: int | None = None
) -> dict[str, Any] | None:
    """Time a rank, or a plain process.

    Args:
        way: "plain", "mpi", "tcp", "bare", "keras" or "trainer"; see the module.
        name: Name of a network in bench.networks.
        batch_size: Number of examples per rank.
        rounds: Number of timed rounds.
        core: Index of the core of a plain process, among those that it may use.
        steps: Number of steps of a round; None: as many as take about `SECONDS`.

    Returns:
        On rank 0: "step_seconds" of each round, "examples" per step, and the last "loss". None on other ranks.
    """
    rank, size = _start(way, core)
    step = training_step(way, name, batch_size, rank, size)
    times, loss = time_rounds(step, rounds, None if steps is None else lambda _: steps)
    return (
        {"step_seconds": times, "examples": batch_size * size, "loss": loss} if rank == 0 else None
    )


def _start(way: str, core: int) -> tuple[int, int]:
    """Start Horovod if `way` needs it, and pin this process to one core; return rank and size."""
    if way == "plain":
        rank, size, local_rank = 0, 1, core
    elif way in ("bare", *get_args(Raw)):
        import horovod.tensorflow as hvd

        if way == "mpi":
            import mpi4py.MPI  # noqa: F401  (starts MPI, which Horovod would otherwise end with itself)
        hvd.init()
        rank, size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    else:
        from hvdtrain.runtime import init

        me = init()
        rank, size, local_rank = me.rank, me.size, me.local_rank
    take_core(local_rank)
    return rank, size


def training_step(
    way: str, name: str, batch_size: int, rank: int, size: int
) -> Callable[[], float]:
    """Return a function that trains one step and returns the loss.

    Args:
        way: "plain", "mpi", "tcp", "bare", "keras" or "trainer"; see the module.
        name: Name of a network in bench.networks.
        batch_size: Number of examples per rank.
        rank: Rank of this process.
        size: Number of ranks.
    """
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


def time_rounds(
    step: Callable[[], float], rounds: int, agree: Callable[[int], int] | None = None
) -> tuple[list[list[float]], float]:
    """Warm up, then time each step of `rounds` rounds; all rounds and all ranks have the same number of steps.

    Args:
        step: Function that trains one step and returns the loss.
        rounds: Number of rounds.
        agree: Function that returns the same number of steps on all ranks, for this rank's; None: Horovod's, if it
            runs.

    Returns:
        The seconds of each step of each round, and the last loss.
    """
    same = agree or _same_everywhere
    # The first two trace, and make the optimizer's variables.
    for _ in range(2):
        step()
    begin = time.perf_counter()
    step()
    few = same(max(1, min(10, round(SECONDS / (time.perf_counter() - begin)))))
    for _ in range(few):
        step()
    begin = time.perf_counter()
    for _ in range(few):
        step()
    steps = same(max(2, round(SECONDS * few / (time.perf_counter() - begin))))
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
    if "horovod.tensorflow" not in sys.modules:
        return steps
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return int(hvd.broadcast(tf.constant(steps), 0, name="bench_steps"))


if __name__ == "__main__":
    report(time_training)
