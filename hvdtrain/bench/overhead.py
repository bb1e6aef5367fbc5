"""Overhead: a step of the Trainer against a step of Keras's own `fit`, in turn, in the same processes.

On one rank the other is plain Keras, on several Keras's `fit` with hvdtrain.keras.DistributedOptimizer. Both train
the same network on the same examples; epochs are timed from the beginning of one to the beginning of the next, so
that reading data, logs and what happens between epochs count. The ratio is taken within a pass, for the machine's
speed drifts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.measurement import run_measurement

SCRIPT = Path(__file__).with_name("overhead_rank.py")
DATA = ("arrays", "dataset")


@dataclass(frozen=True)
class OverheadPass:
    """Milliseconds of a step in one pass, on rank 0."""

    fit: float
    trainer: float

    @property
    def ratio(self) -> float:
        return self.trainer / self.fit


def measure_overhead(
    model: str,
    data: str,
    batch_size: int,
    np: int,
    passes: int,
    launch: Callable[[int, Path, tuple[str, ...]], list[str]],
) -> list[OverheadPass]:
    """Return `passes` timings of `np` ranks in one launch. Raises EngineError.

    Args:
        model: name of a network in bench.models.
        data: "arrays" or "dataset".
        batch_size: examples a rank.
        launch: composes the argv that runs a script with its arguments on so many ranks.
    """
    arguments = (
        *(f"--model={model}", f"--data={data}"),
        *(f"--batch-size={batch_size}", f"--passes={passes}"),
    )
    report = run_measurement(launch(np, SCRIPT, arguments), {})
    return [OverheadPass(*one) for one in report["milliseconds"]]
