"""Compares the recording of a run on several workers with that of a run on one.

Two float32 sums of the same numbers in another order differ in their last bits, and the optimizer carries that on. How
far is measured, not assumed: a third run, on one worker, takes the examples of each batch in the opposite order. What
is ROOM times as far apart as these two runs on one worker is not explained by the order of sums.

All differences are relative to what training has changed so far: |a - b| / |a - start|, as Euclidean norms over a
variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hvdtrain.verify.recording import RecordedStep, Recording

ROOM = 10.0
"""Ratio up to which a difference is explained: two orders of sums are a small sample of all."""

LEAST = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Difference that is explained in any case, by the dtype of the gradients: a hundred times the rounding of float32, and
ten times that of the others, as each worker's sum is rounded."""

UNCLEAR = 1e-2
"""Difference of the two runs on one worker over all variables from which nothing can be said."""

_SETTLED = 1e-6
"""Part of a variable's own norm that counts as its change if it has changed less, such as one that is not trained."""


@dataclass(frozen=True)
class Gap:
    """How far a value is from that on one worker, and how far the order of sums explains.

    Attributes:
        name: Name of the variable or of the value in the logs.
        found: Relative difference between the run on several workers and that on one.
        explained: Largest relative difference that the order of sums explains.
    """

    name: str
    found: float
    explained: float

    @property
    def is_fault(self) -> bool:
        """Whether the difference has another cause. A nan is a fault where one worker has none."""
        return not self.found <= self.explained

    @property
    def times(self) -> float:
        """The difference as a multiple of what is explained."""
        return self.found / self.explained


@dataclass(frozen=True)
class StepVerdict:
    """The comparison of one step.

    Attributes:
        step: Number of the step; 0 is the state before training.
        examples: Number of examples of the global batch that differ or are in another place.
        of: Number of examples of the global batch on one worker.
        whole: Difference over all variables together.
        gaps: All variables and logs, those furthest from what is explained first.
        reordered: Difference over all variables between the two runs on one worker.
        apart: Names of the variables that the several workers should hold alike, and do not.
    """

    step: int
    examples: int
    of: int
    whole: float
    gaps: tuple[Gap, ...]
    reordered: float
    apart: tuple[str, ...]

    @property
    def faults(self) -> list[Gap]:
        """Differences that the order of sums does not explain."""
        return [gap for gap in self.gaps if gap.is_fault]

    @property
    def outcome(self) -> Literal["same", "different", "unclear"]:
        """ "unclear" if one worker differs from itself when the examples of a batch change places."""
        if self.reordered > UNCLEAR:
            return "unclear"
        return "different" if self.examples or self.faults or self.apart else "same"


def compare(one: Recording, reordered: Recording, several: Recording) -> list[StepVerdict]:
    """Compare step by step, as far as all three recordings go.

    Args:
        one: Run on one worker.
        reordered: The same with the examples of each batch in the opposite order.
        several: Run on several workers.
    """
    if not (one.steps and reordered.steps and several.steps):
        return []
    if bool(one.steps[-1].examples) != bool(several.steps[-1].examples):
        # --adopt trains with a Trainer on one worker, and by Keras's fit on several: only their weights have one name.
        common = one.steps[0].arrays.keys() & several.steps[0].arrays.keys()
        one, reordered, several = (_weights_of(run, common) for run in (one, reordered, several))
    start = one.steps[0].arrays
    least = LEAST[one.facts.get("precision", "float32")]
    steps = zip(one.steps, reordered.steps, several.steps, strict=False)
    found = [_compare_step(start, least, *three) for three in steps]
    # What no longer differs after the first step is no fault: one worker creates a variable before it, another in it.
    lasting = {gap.name for gap in found[min(1, len(found) - 1)].faults}
    gaps = tuple(gap for gap in found[0].gaps if gap.name in lasting or not gap.is_fault)
    return [replace(found[0], gaps=gaps), *found[1:]]


def _weights_of(run: Recording, names: Collection[str]) -> Recording:
    """Return a recording with these arrays only, and without examples and logs."""
    steps = [
        replace(
            step,
            examples=(),
            logs={},
            arrays={name: array for name, array in step.arrays.items() if name in names},
        )
        for step in run.steps
    ]
    return replace(run, steps=steps)


def _compare_step(
    start: Mapping[str, np.ndarray],
    least: float,
    one: RecordedStep,
    other: RecordedStep,
    several: RecordedStep,
) -> StepVerdict:
    places = max(len(one.examples), len(several.examples))
    equal = sum(a == b for a, b in zip(one.examples, several.examples, strict=False))
    whole = _over_all(start, one, other)
    gaps = [
        *_of_arrays(start, least, whole, one, other, several),
        *_of_logs(least, one, other, several),
    ]
    gaps.sort(key=lambda gap: -np.nan_to_num(gap.times, nan=np.inf))
    return StepVerdict(
        one.step,
        places - equal,
        len(one.examples),
        _over_all(start, one, several),
        tuple(gaps),
        whole,
        several.apart,
    )


def _of_arrays(
    start: Mapping[str, np.ndarray],
    least: float,
    whole: float,
    one: RecordedStep,
    other: RecordedStep,
    several: RecordedStep,
) -> Iterator[Gap]:
    for name in {**one.arrays, **several.arrays}:
        if name not in one.arrays or name not in several.arrays:
            yield Gap(name, np.inf, least)
            continue
        value = one.arrays[name]
        change = _change(start, name, value)
        explained = _ratio(_distance(value, other.arrays.get(name, value)), change)
        found = _ratio(_distance(value, several.arrays[name]), change)
        # The two runs on one worker may agree in the last bit of a large value that hardly changes, and where an
        # activation is near a kink.
        last_bit = _ratio(_last_bit(value), change)
        yield Gap(name, found, max(least, last_bit, ROOM * max(explained, whole)))


def _last_bit(value: np.ndarray) -> float:
    """Return the distance of an array from one that differs in the last bit of each number."""
    if value.dtype.kind != "f":
        return 0.0
    return float(np.finfo(value.dtype).eps) * _distance(value, np.zeros_like(value))


def _of_logs(
    least: float, one: RecordedStep, other: RecordedStep, several: RecordedStep
) -> Iterator[Gap]:
    for name in {**one.logs, **several.logs}:
        value = one.logs.get(name, np.nan)
        found = _apart(several.logs.get(name, np.nan), value)
        if found == 0 and name in one.logs and name in several.logs:
            continue
        explained = _apart(other.logs.get(name, value), value)
        scale = max(abs(value), _SETTLED) if np.isfinite(value) else 1.0
        yield Gap(name, found / scale, max(least, ROOM * explained / scale))


def _apart(one: float, other: float) -> float:
    """Return the distance of two numbers: 0 if both are nan or the same inf, inf if only one is such."""
    if one == other or (np.isnan(one) and np.isnan(other)):
        return 0.0
    distance = abs(one - other)
    return distance if np.isfinite(distance) else float(np.inf)


def _over_all(start: Mapping[str, np.ndarray], one: RecordedStep, other: RecordedStep) -> float:
    """Return the difference over all variables but counters that training has changed."""
    floating = (name for name, value in one.arrays.items() if value.dtype.kind == "f")
    names = [name for name in floating if name in other.arrays and name in start]
    apart = [_distance(one.arrays[name], other.arrays[name]) for name in names]
    changes = [_distance(one.arrays[name], start[name]) for name in names]
    whole = float(np.linalg.norm(changes))
    return float(np.linalg.norm(apart)) / whole if whole else float(any(apart))


def _change(start: Mapping[str, np.ndarray], name: str, value: np.ndarray) -> float:
    norm = _distance(value, np.zeros_like(value))
    changed = _distance(value, start[name]) if name in start else norm
    return max(changed, _SETTLED * norm)


def _ratio(distance: float, change: float) -> float:
    if distance == 0:
        return 0.0
    return distance / change if change else float(np.inf)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Euclidean norm of a - b; inf if their shapes differ. Where both are nan or the same inf, 0 counts."""
    if a.shape != b.shape:
        return float(np.inf)
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.linalg.norm(np.where(same, 0.0, a - np.where(same, 0.0, b)).ravel()))
