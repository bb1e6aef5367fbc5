"""What a step changes without a gradient: does the growth on the parts of a batch make that on the batch?

A counter of steps and a target network grow alike on any part. A counter of examples grows by the sum of its parts, a
moving mean by their mean: these are put together over the ranks in every step, for the next one may read them. What
grows in another way (a moving variance, a queue of examples) is averaged at the end of an epoch, which is not what one
process has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.reduction import scaled
from hvdtrain.collectives.step_context import current_step

TOLERANCE = 1e-3
"""Relative: a few float32 roundings. Another rule is off by about the ratio of the parts' sizes."""
EPSILONS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
"""By what a variable's value is rounded, relative, and so a small growth of it."""
FURTHER = 1000
"""Steps that the second look is ahead of the first: a decaying sum looks like a sum near zero."""

Values = list[np.ndarray]


@dataclass(frozen=True)
class Kinds:
    """Places of variables.

    Attributes:
        summed: that grow by the sum of what they grow on the parts.
        averaged: by their mean, each part counting by its examples.
        unclear: otherwise, and not alike on any part.
    """

    summed: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    unclear: tuple[int, ...] = ()


def kinds_of_growth(
    variables: Sequence[tf.Variable],
    run: Callable[[Any], Any],
    whole: Any,
    parts: Sequence[Any],
    shares: Sequence[float],
) -> Kinds:
    """Return how `variables` grow in a step. They are left at other values.

    Args:
        variables: numbers.
        run: makes a step.
        whole: a batch.
        parts: of it.
        shares: examples of each part / examples of the batch.
    """
    # A part of a growth does not fit into an integer.
    fitting = [
        {"same", "sum", "mean"} if v.dtype.is_floating else {"same", "sum"} for v in variables
    ]
    for _ in range(2):
        start = _read(variables)
        grown, again = (_growth(variables, start, run, whole) for _ in range(2))
        # Weights that a step assigns to may overflow so far ahead, which says nothing.
        if not any(each.any() for each in grown) or not all(np.isfinite(g).all() for g in grown):
            break
        of_parts = [_growth(variables, start, run, part) for part in parts]
        roundings = [_rounding(v, value) for v, value in zip(variables, start, strict=True)]
        for rules, rounding, one, other, *several in zip(
            fitting, roundings, grown, again, *of_parts, strict=True
        ):
            if _close(one, other):  # Else it grows at random.
                rules &= _rules(one, several, shares, rounding)
        _write(variables, [s + FURTHER * g for s, g in zip(start, grown, strict=True)])
    return Kinds(
        tuple(place for place, rules in enumerate(fitting) if rules == {"sum"}),
        tuple(place for place, rules in enumerate(fitting) if rules == {"mean"}),
        tuple(place for place, rules in enumerate(fitting) if rules in ({"sum", "mean"}, set())),
    )


def _rules(
    one: np.ndarray, parts: Sequence[np.ndarray], shares: Sequence[float], rounding: float
) -> set[str]:
    """Return by which rules the growth on the parts, each rounded, makes that on the whole."""
    mean = sum(share * part for share, part in zip(shares, parts, strict=True))

    def fitting(slack: float) -> set[str]:
        fits = {
            "same": all(_close(part, one) for part in parts),
            "mean": _close(mean, one, slack),
            "sum": _close(sum(parts), one, slack),
        }
        return {rule for rule, does in fits.items() if does}

    return fitting(0.0) or fitting(rounding)


def _growth(
    variables: Sequence[tf.Variable], start: Values, run: Callable[[Any], Any], data: Any
) -> Values:
    """Return by how much a step on `data` changes `variables` from `start`, which they have again afterwards."""
    run(data)
    grown = [value - before for value, before in zip(_read(variables), start, strict=True)]
    _write(variables, start)
    return grown


def _read(variables: Sequence[tf.Variable]) -> Values:
    return [variable.numpy().astype(np.float64) for variable in variables]


def _write(variables: Sequence[tf.Variable], values: Values) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _rounding(variable: tf.Variable, value: np.ndarray) -> float:
    """Return by how much a growth from `value` on the whole and on two parts may be off."""
    return 3 * EPSILONS.get(variable.dtype.name, 0.0) * float(np.abs(value).max(initial=0.0))


def _close(one: Any, other: Any, rounding: float = 0.0) -> bool:
    limit = TOLERANCE * np.abs(other).max(initial=0.0) + rounding
    return bool(np.abs(one - other).max(initial=0.0) <= limit)


def grown_together(
    summed: Sequence[tf.Variable],
    averaged: Sequence[tf.Variable],
    ranks: Communicator,
    work: Callable[[], Any],
) -> Any:
    """Return what `work` returns, a step on this rank; variables then have grown by what they did on all ranks.

    Args:
        summed, averaged: by the sum over the ranks, and by their mean by examples.
    """
    variables = [*summed, *averaged]
    before = [variable.read_value() for variable in variables]
    result = work()
    step = current_step()
    if step is None:
        return result
    grown: dict[str, dict[int, tf.Tensor]] = {}  # by dtype, by place
    for place, (variable, value) in enumerate(zip(variables, before, strict=True)):
        share = tf.sign(step.share) if place < len(summed) else step.share
        own = scaled(variable - value, share, no_nan=variable.dtype.is_floating)
        grown.setdefault(variable.dtype.name, {})[place] = own
    for dtype, own in grown.items():
        totals = ranks.grouped_allreduce([*own.values()], f"hvdtrain_growth_{dtype}")
        for place, total in zip(own, totals, strict=True):
            variables[place].assign(before[place] + total)
    return result
