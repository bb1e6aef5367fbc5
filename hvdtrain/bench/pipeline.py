"""The pipeline's bubble: s stages of one core each against one stage on one core, in the same micro-batches.

With m micro-batches and stages of equal work, 1F1B takes (m + s - 1) / m of what s cores would take that never
wait: of the step of one core, divided by s. That one core runs the same program (pipeline_rank.py) with a single
stage. The two are timed one after the other in each pass, for the machine's speed drifts; the ratio is taken
within a pass, and the median of the passes counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.measurement import run_measurement

SCRIPT = Path(__file__).with_name("pipeline_rank.py")


@dataclass(frozen=True)
class Work:
    """What is trained: `layers` dense layers of `width`, on batches of `batch_size`."""

    layers: int = 8
    width: int = 512
    batch_size: int = 1024


@dataclass(frozen=True)
class BubblePass:
    """Seconds of a step in one pass."""

    micro_batches: int
    stages: int
    alone: float
    together: float

    @property
    def ideal(self) -> float:
        """Seconds if no stage ever waited."""
        return self.alone / self.stages

    @property
    def ratio(self) -> float:
        """How many times the ideal the stages took."""
        return self.together / self.ideal

    @property
    def theory(self) -> float:
        """The ratio of stages of equal work between which messages take no time."""
        return (self.micro_batches + self.stages - 1) / self.micro_batches


def measure_bubble(
    micro_batches: Sequence[int],
    work: Work,
    passes: int,
    stages: int,
    launch: Callable[[int, Path, tuple[str, ...]], list[str]],
) -> Iterator[list[BubblePass]]:
    """Yield `passes` lists of timings, one for each number of micro-batches. Raises EngineError.

    Args:
        micro_batches: the numbers to time.
        work: what is trained.
        passes: how many.
        stages: how many.
        launch: composes the argv that runs a script with its arguments on so many ranks.
    """
    arguments = (
        f"--micro-batches={','.join(map(str, micro_batches))}",
        f"--layers={work.layers}",
        f"--width={work.width}",
        f"--batch-size={work.batch_size}",
    )
    for _ in range(passes):
        alone = _seconds(launch(1, SCRIPT, arguments))
        together = _seconds(launch(stages, SCRIPT, arguments))
        yield [BubblePass(m, stages, alone[m], together[m]) for m in micro_batches]


def medians(passes: Sequence[Sequence[BubblePass]]) -> list[tuple[int, float, float, float, float]]:
    """Return (micro-batches, ideal seconds, seconds, ratio, theory) of each number, medians over the passes."""
    return [
        (
            column[0].micro_batches,
            statistics.median(one.ideal for one in column),
            statistics.median(one.together for one in column),
            statistics.median(one.ratio for one in column),
            column[0].theory,
        )
        for column in zip(*passes, strict=True)
    ]


def _seconds(argv: list[str]) -> dict[int, float]:
    """Return the seconds of a step for each number of micro-batches."""
    report = run_measurement(argv, {})
    return {int(m): statistics.median(rounds) for m, rounds in report["seconds"].items()}
