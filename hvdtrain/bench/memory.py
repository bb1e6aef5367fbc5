"""Memory: the peak of one rank while it trains, against what weights, gradients and optimizer state take.

n parameters of 4 bytes with Adam, whose state is two values a parameter: 16 n bytes in plain training. Sharded
state (ZeRO-1; Rajbhandari et al. 2020, section 5.1) leaves 8 n + 8 n / N on each of N ranks; layers that are
split over N ranks, or cut into N stages, leave 16 n / N. What is measured beside that: activations (kept
small by a small batch), the buffers of the communication, and what an operation holds for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.measurement import run_measurement

SCRIPT = Path(__file__).with_name("memory_rank.py")
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""What is freed goes back to the system at once: otherwise the allocator's habits are measured."""
MEGABYTE = 1e6


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        way: "data" (whole optimizer state), "zero", "tensor" or "pipeline".
        ranks: of the job.
    """

    way: str
    ranks: int

    @property
    def name(self) -> str:
        """As in `hvdtrain bench memory --case`."""
        return f"{self.way}-{self.ranks}"


CASES = {
    case.name: case
    for case in (
        Case("data", 1),
        Case("data", 2),
        Case("zero", 2),
        Case("zero", 4),
        Case("tensor", 2),
        Case("tensor", 4),
        Case("pipeline", 2),
    )
}


@dataclass(frozen=True)
class Theory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        """All three."""
        return self.weights + self.gradients + self.state


def theory(case: Case, parameters: int) -> Theory:
    """Return what one rank holds of a model of float32 parameters that Adam trains."""
    model = 4.0 * parameters
    if case.way in ("data", "zero"):
        return Theory(model, model, 2 * model / (case.ranks if case.way == "zero" else 1))
    return Theory(model / case.ranks, model / case.ranks, 2 * model / case.ranks)


@dataclass(frozen=True)
class Peak:
    """What was measured.

    Attributes:
        parameters: of the model.
        peaks: bytes of each rank above what it held before the model was made.
    """

    parameters: int
    peaks: tuple[int, ...]


def measure_peak(
    case: Case, launch: Callable[[int, Path, tuple[str, ...]], list[str]], width: int, blocks: int
) -> Peak:
    """Train for a few steps on the ranks of `case`.

    Args:
        case: how.
        launch: composes the argv that runs a script with its arguments on so many ranks.
        width: of the model; see memory_rank.py.
        blocks: of the model.

    Raises:
        EngineError: the training failed.
    """
    arguments = (case.way, f"--ranks={case.ranks}", f"--width={width}", f"--blocks={blocks}")
    argv = launch(case.ranks, SCRIPT, arguments)
    report = run_measurement(argv, FREED_AT_ONCE)
    return Peak(int(report["parameters"]), tuple(report["peak_of_ranks"]))


HEADER = ("way", "ranks", "weights", "gradients", "state", "sum", "measured", "ratio")


def row(case: Case, peak: Peak) -> tuple[str, ...]:
    """Return the line of the table, in megabytes (10^6 bytes); the rank with the most counts."""
    by_theory = theory(case, peak.parameters)
    most = max(peak.peaks)
    sizes = (by_theory.weights, by_theory.gradients, by_theory.state, by_theory.total, most)
    return (
        case.way,
        str(case.ranks),
        *(f"{size / MEGABYTE:,.0f}" for size in sizes),
        f"{most / by_theory.total:.2f}",
    )
