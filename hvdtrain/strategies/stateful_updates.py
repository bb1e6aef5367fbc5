"""Variables that a step changes without a gradient, and the rule by which their changes combine over parts of a batch.

A counter of steps or a target network changes alike on any part. A counter of examples grows by the sum over the
parts, a moving mean by their mean: these are combined over the ranks in every step, as the next step may read them.
Variables with another rule (a moving variance, a queue of examples) are averaged at the end of an epoch, which is
not what one process computes.
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
from hvdtrain.keras_internals.variables import assign

TOLERANCE = 1e-3
"""Relative tolerance: a few float32 roundings. A wrong rule is off by about the ratio of the parts' sizes."""
EPSILONS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
"""Relative rounding error of a variable's value, and so the absolute error of a small growth, by dtype."""
FURTHER = 1000
"""Steps between the first test and the second one: near 0, v = 0.99 v + x cannot be told from v = v + x."""

Values = list[np.ndarray]


@dataclass(frozen=True)
class Kinds:
    """Indices of variables by the rule of their growth.

    Attributes:
        summed: Variables that grow by the sum of their growth on the parts.
        averaged: Variables that grow by the mean over the parts, weighted by examples.
        unclear: Variables that grow by another rule, and not alike on any part.
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
    """Return the rules by which `variables` grow in a step. Their values are changed.

    Args:
        variables: Numeric variables.
        run: Runs a step on a batch.
        whole: A batch.
        parts: Its parts.
        shares: Examples of each part, divided by those of the batch.
    """
    # A fraction of a growth cannot be stored in an integer.
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
            if _close(one, other):  # Otherwise the growth is random.
                rules &= rules_of(one, several, shares, rounding)
        assign(variables, [s + FURTHER * g for s, g in zip(start, grown, strict=True)])
    return Kinds(
        tuple(place for place, rules in enumerate(fitting) if rules == {"sum"}),
        tuple(place for place, rules in enumerate(fitting) if rules == {"mean"}),
        tuple(place for place, rules in enumerate(fitting) if rules in ({"sum", "mean"}, set())),
    )


def rules_of(
    one: np.ndarray, parts: Sequence[np.ndarray], shares: Sequence[float], rounding: float = 0.0
) -> set[str]:
    """Return the rules by which the growth on the parts, within its rounding error, yields that on the whole."""
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
    """Return the change of `variables` from `start` by a step on `data`; restore `start`."""
    run(data)
    grown = [value - before for value, before in zip(_read(variables), start, strict=True)]
    assign(variables, start)
    return grown


def _read(variables: Sequence[tf.Variable]) -> Values:
    return [variable.numpy().astype(np.float64) for variable in variables]


def _rounding(variable: tf.Variable, value: np.ndarray) -> float:
    """Return the absolute rounding error of growths from `value` on the whole and on two parts."""
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
    """Run a step, and let variables grow by their combined growth over the ranks; return the result of the step.

    Args:
        summed: Variables that grow by the sum over the ranks.
        averaged: Variables that grow by the mean over the ranks, weighted by examples.
        ranks: Ranks that share the batch.
        work: Runs the step on this rank.
    """
    variables = [*summed, *averaged]
    before = [variable.read_value() for variable in variables]
    result = work()
    step = current_step()
    if step is None:
        return result
    grown: dict[str, dict[int, tf.Tensor]] = {}  # By dtype, by index.
    for place, (variable, value) in enumerate(zip(variables, before, strict=True)):
        share = tf.sign(step.share) if place < len(summed) else step.share
        own = scaled(variable - value, share, no_nan=variable.dtype.is_floating)
        grown.setdefault(variable.dtype.name, {})[place] = own
    for dtype, own in grown.items():
        totals = ranks.grouped_allreduce([*own.values()], f"hvdtrain_growth_{dtype}")
        for place, total in zip(own, totals, strict=True):
            variables[place].assign(before[place] + total)
    return result
