"""What is said of a case: the Trainer on some ranks against plain Keras in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from exactness.case import Case

EQUAL, WARNED, REFUSED, SILENT, BROKEN = "equal", "warned", "refused", "SILENT", "broken"
TOLERANCE = 1e-5
"""Of values up to 1, else relative: eight steps in float32, whose sums of 8 examples are made in another order, on
gradients of about 1 at rates up to 0.1. What is wrong by nature differs by 1e-3 and more."""
HALF = {"mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}
"""As above with sums rounded to 11 and 8 bits, which eight steps with momentum 0.9 carry on."""
OF_LOGS = ("The metric ", "The step returns ")
"""Beginnings of warnings that speak of one log, the name of which they quote, and of nothing else."""


@dataclass(frozen=True)
class Verdict:
    """Of one case on one number of ranks.

    Attributes:
        word: EQUAL, WARNED, REFUSED, SILENT or BROKEN.
        apart: the largest difference.
        why: what hvdtrain said, or what differs.
    """

    word: str
    apart: float = 0.0
    why: str = ""

    @property
    def is_fault(self) -> bool:
        return self.word in (SILENT, BROKEN)


def judge(case: Case, wanted: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> Verdict:
    """Return what is to be said.

    Args:
        case: the training.
        wanted: what training.by_keras returned.
        ranks: what training.by_trainer returned on each rank.
    """
    refused = [found.get("refused") for found in ranks]
    if any(refused):
        # On all ranks: else some would wait for the others.
        return Verdict(REFUSED if all(refused) else BROKEN, why=next(filter(None, refused)))
    limit = HALF.get(case.policy, TOLERANCE)
    far = {}
    for found in ranks:
        for part, distance in differences(found, wanted):
            far[part] = max(far.get(part, 0.0), distance)
    wrong = {part: distance for part, distance in far.items() if not distance <= limit}
    largest = max(far.values())
    if not wrong:
        return Verdict(EQUAL, largest)
    told = [text for text in ranks[0]["warnings"] if text not in wanted["warnings"]]
    excuses = {part: _excuse(part, told) for part in wrong}
    if all(excuses.values()):
        return Verdict(WARNED, largest, next(iter(excuses.values())))
    worst = {part: f"{wrong[part]:.2g}" for part, excuse in excuses.items() if not excuse}
    return Verdict(SILENT, largest, f"{worst}" + (f"; told: {told}" if told else ""))


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each part that both found, and how far it is apart."""
    yield "weights", _far(found["weights"], wanted["weights"])
    for kind in ("history", "evaluate"):
        own, its = found.get(kind, {}), wanted.get(kind, {})
        for name in its.keys() | own.keys():
            both = name in own and name in its
            yield f"{kind} {name}", _far(own[name], its[name]) if both else np.inf
    if "predict" in wanted:
        yield "predict", _far(found["predict"], wanted["predict"])


def moved(wanted: dict[str, Any]) -> float:
    """Return how far plain Keras has moved the weights: a case in which nothing moves says nothing."""
    return _far(wanted["weights"], wanted["start"]) if wanted["start"] else np.inf


def _far(found: Any, wanted: Any) -> float:
    mine, its = list(_leaves(found)), list(_leaves(wanted))
    if len(mine) != len(its):
        return np.inf
    return max((_distance(a, b) for a, b in zip(mine, its, strict=True)), default=0.0)


def _leaves(value: Any) -> Iterator[Any]:
    """Without Keras, whose import takes longer than a case."""
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _distance(found: Any, wanted: Any) -> float:
    a, b = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    if a.shape != b.shape:
        return np.inf
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(alike, 0.0, np.abs(a - b) / np.maximum(1, np.abs(b)))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def _excuse(part: str, told: Sequence[str]) -> str:
    """Return the warning that says of this part that it differs; "": none does."""
    kind, _, log = part.partition(" ")
    for text in told:
        if not text.startswith(OF_LOGS):
            return text
        names = re.findall(r"'([^']+)'", text)
        if kind != "weights" and log.removeprefix("val_").startswith(tuple(names)):
            return text
    return ""
