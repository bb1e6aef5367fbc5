"""Scaling: N ranks of one core each against plain Keras on one core, in turn, in one run.

These machines are shared and their speed drifts, so all are timed one after the other in each pass, the
ratios are taken within a pass, and the median of the passes counts. Scaling is
(examples a second of N ranks) / (N x examples a second of one plain process): 1 is perfect.

Two figures of the machine stand beside it. Cores share memory, so N plain processes at once, which know nothing
of each other, do not reach 1 ("apart"). And synchronous training waits in each step for the slowest: had those
processes waited for each other, a step would have taken the longest of their times for it ("in step"). No
synchronous training can be quicker than that; what is lost below it is ours.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.measurement import run_measurement
from hvdtrain.launch.running.bounded import end_all

ROUNDS = 5


@dataclass(frozen=True)
class Pass:
    """Examples a second in one pass.

    plain: of plain Keras on one core; apart: of `size` plain processes at once, together; in_step: of the same if
    each step took as long as the slowest of them needed; ranks: of all ranks together.
    """

    plain: float
    apart: float
    in_step: float
    ranks: float
    size: int

    def scaling(self, rate: float) -> float:
        """Part of the perfect speed-up that `rate` is."""
        return rate / (self.size * self.plain)


@dataclass(frozen=True)
class Timing:
    """Seconds of each step of each round, and the examples of a step."""

    rounds: list[list[float]]
    examples: int

    @property
    def rate(self) -> float:
        """Examples a second, the median of the rounds."""
        return statistics.median(self.examples * len(steps) / sum(steps) for steps in self.rounds)


SCRIPT = Path(__file__).with_name("scaling_rank.py")


def timing_arguments(way: str, model: str, batch_size: int) -> tuple[str, ...]:
    """Return the arguments of scaling_rank.py."""
    return (way, f"--model={model}", f"--batch-size={batch_size}", f"--rounds={ROUNDS}")


def measure(
    model: str,
    batch_size: int,
    way: str,
    passes: int,
    size: int,
    launch: Callable[[int, Path, tuple[str, ...]], list[str]],
) -> Iterator[Pass]:
    """Yield `passes` passes: plain Keras once, as often as there are ranks, and the ranks.

    Args:
        model: name of a network in bench.models.
        batch_size: examples a rank.
        way: "keras", "trainer" or "bare"; see scaling_rank.py.
        passes: how many.
        size: ranks.
        launch: composes the argv that runs a script with its arguments on so many ranks.
    """
    plain = [sys.executable, str(SCRIPT), *timing_arguments("plain", model, batch_size)]
    together = launch(size, SCRIPT, timing_arguments(way, model, batch_size))
    cores = [[*plain, f"--core={core}"] for core in range(size)]
    for _ in range(passes):
        alone = _time(plain)
        with ThreadPoolExecutor(size) as pool:
            try:
                apart = list(pool.map(_time, cores))
            except BaseException:
                end_all()  # The pool waits for what runs.
                raise
        yield Pass(
            plain=alone.rate,
            apart=sum(one.rate for one in apart),
            in_step=in_step(apart).rate,
            ranks=_time(together).rate,
            size=size,
        )


def in_step(apart: Sequence[Timing]) -> Timing:
    """Return the timing of processes that would have waited for the slowest of them in each step."""
    rounds = [
        [max(times) for times in zip(*steps, strict=False)]
        for steps in zip(*(one.rounds for one in apart), strict=True)
    ]
    return Timing(rounds, sum(one.examples for one in apart))


def _time(argv: list[str]) -> Timing:
    report = run_measurement(argv, {})
    return Timing(report["step_seconds"], report["examples"])
