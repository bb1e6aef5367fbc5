"""Rules that merge the metric states of several workers into that of one, found by experiment.

A metric is updated for a few steps with whole batches, as on one worker, and with parts of them, as on several workers
(uneven parts, and a worker without examples). The first rule that merges the states of the parts into the state of the
whole batches is used for that state:

- sum: counts and sums over examples, confusion matrices;
- share: each update is weighted by the worker's share of the batch, then the states are summed. For states that grow
  by a mean over the batch in each step: one worker counts a batch once, and so do several whose shares add up to 1;
- max, min: running maximum and minimum, and integer counters of steps;
- last: states that each step overwrites, averaged by examples.

No rule fits the square root of a mean, or a ratio of sums (Dice): such a state gets the rule with the nearest result,
and the finding contains both results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.keras_internals.variables import assign, tf_variable

SUM, SHARE, MAX, MIN, LAST = RULES = ("sum", "share", "max", "min", "last")
NEAREST = (SHARE, SUM, MAX, MIN, LAST)
"""Order of preference if no rule is exact and several are about as near: most such states are means over batches."""
MEAN, FIRST = "mean", "first"
"""Rules for variables that declare them: the plain mean over ranks, and the first rank's value."""
DECLARED = {"mean": MEAN, "only_first_replica": FIRST}

MetricState = list[np.ndarray]


Updates = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
"""Arguments (args, kwargs) of each update of a metric in one step; none on an idle worker."""


@dataclass(frozen=True)
class Trial:
    """The same steps on one worker and on several.

    Attributes:
        whole: Steps of one worker, on whole batches.
        parts: Steps of each of several workers, on their parts of the same batches.
        shares: Each worker's share of the examples of each batch.
    """

    whole: Sequence[Updates]
    parts: Sequence[Sequence[Updates]]
    shares: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Finding:
    """Rules found for a metric, and how well they fit.

    Attributes:
        rules: Rule of each variable of the metric, in their order.
        exact: Whether the rules give exactly the state of one worker.
        one, several: Result of the metric on one worker, and from the merged state of several, in the trial in which
            they differ most: flat float64 arrays.
    """

    rules: tuple[str, ...]
    exact: bool
    one: np.ndarray
    several: np.ndarray


def find_rules(
    metric: keras.metrics.Metric, trials: Sequence[Trial], allowed: Sequence[str] = RULES
) -> Finding:
    """Find the rules that merge the states of `metric`, whose state is restored afterwards.

    Variables with aggregation "mean" or "only_first_replica" get that rule without a trial.

    Args:
        metric: Metric to update in the trials.
        trials: Trials in all of which a rule must fit.
        allowed: Rules to try, in this order.
    """
    with _kept(metric):
        tried = [_Tried.of(metric, trial) for trial in trials]
        fits = {rule: _fits(tried, rule) for rule in allowed}
        declared = [declared_rule(v) for v in metric.variables]
        found = [
            word or next((rule for rule in allowed if fits[rule][i]), None)
            for i, word in enumerate(declared)
        ]
        exact = None not in found
        rules = tuple(rule or SUM for rule in found)
        if not exact:
            uniform = [
                tuple(word or rule for word in declared) for rule in NEAREST if rule in allowed
            ]
            rules = min(uniform, key=lambda r: round(max(t.distance(metric, r) for t in tried), 1))
        worst = max(tried, key=lambda t: t.distance(metric, rules))
        return Finding(rules, exact, worst.one, worst.several(metric, rules))


@dataclass(frozen=True)
class _Tried:
    """States of a metric after a trial, and its result on one worker."""

    wanted: MetricState
    one: np.ndarray
    plain: list[MetricState]
    weighted: list[MetricState]
    last_shares: list[float]

    @classmethod
    def of(cls, metric: keras.metrics.Metric, trial: Trial) -> _Tried:
        wanted = _state_after(metric, trial.whole)
        weighted = [
            _state_after(metric, steps, shares)
            for steps, shares in zip(trial.parts, trial.shares, strict=True)
        ]
        return cls(
            wanted,
            _result(metric, wanted),
            [_state_after(metric, steps) for steps in trial.parts],
            weighted,
            [shares[-1] for shares in trial.shares],
        )

    def combined(self, rules: Sequence[str]) -> MetricState:
        return [
            combine(
                rule,
                [s[i] for s in (self.weighted if rule == SHARE else self.plain)],
                self.last_shares,
            )
            for i, rule in enumerate(rules)
        ]

    def several(self, metric: keras.metrics.Metric, rules: Sequence[str]) -> np.ndarray:
        return _result(metric, self.combined(rules))

    def distance(self, metric: keras.metrics.Metric, rules: Sequence[str]) -> float:
        difference = np.abs(self.several(metric, rules) - self.one)
        relative = difference / np.maximum(np.abs(self.one), 1e-6)
        return float(np.sum(np.nan_to_num(relative, nan=0.0)))


def _fits(tried: Sequence[_Tried], rule: str) -> list[bool]:
    """Return for each variable whether `rule` gives the state of one worker in all trials."""
    each = [
        [
            _close(one, other)
            for one, other in zip(t.combined([rule] * len(t.wanted)), t.wanted, strict=True)
        ]
        for t in tried
    ]
    return [all(of_variable) for of_variable in zip(*each, strict=True)]


def combine(rule: str, states: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """Return the merged state of one variable.

    Args:
        rule: Name of the rule; for "share", the states must have been weighted during the updates.
        states: The variable's state on each worker.
        shares: Each worker's share of the last step.
    """
    stacked = np.stack(states)
    wide = stacked.astype(np.float64)
    if rule in (SUM, SHARE):
        combined = wide.sum(0)
    elif rule in (MAX, MIN):
        combined = wide.max(0) if rule == MAX else wide.min(0)
    elif rule == LAST:
        combined = np.tensordot(np.asarray(shares), wide, 1)
    elif rule == MEAN:
        combined = wide.mean(0)
    else:
        combined = wide[0]
    return np.asarray(combined).astype(stacked.dtype)


def declared_rule(variable: Any) -> str | None:
    """Return the rule of a variable's declared aggregation; None for any other, such as "sum", Keras's default."""
    return DECLARED.get(getattr(variable, "aggregation", None) or "sum")


def can_be_weighted(variable: Any) -> bool:
    """Whether the updates of a variable can be weighted by a share: not if its dtype is integer."""
    return bool(tf_variable(variable).dtype.is_floating)


@contextlib.contextmanager
def _kept(metric: keras.metrics.Metric) -> Iterator[None]:
    own = _state(metric)
    try:
        yield
    finally:
        # The first update may have created the variables.
        metric.reset_state()
        assign(metric.variables[: len(own)], own)


def _state(metric: keras.metrics.Metric) -> MetricState:
    return [tf_variable(v).numpy() for v in metric.variables]


def _state_after(
    metric: keras.metrics.Metric, steps: Sequence[Updates], shares: Sequence[float] | None = None
) -> MetricState:
    """Return the state after `steps`; with `shares`, the change in each step is weighted by its share."""
    metric.reset_state()
    for number, updates in enumerate(steps):
        before = _state(metric)
        for args, kwargs in updates:
            metric.update_state(*args, **kwargs)
        if shares is not None:
            for variable, value in zip(metric.variables, before, strict=True):
                if can_be_weighted(variable):
                    grown = tf_variable(variable).numpy() - value
                    tf_variable(variable).assign(value + shares[number] * grown)
    return _state(metric)


def _result(metric: keras.metrics.Metric, state: MetricState) -> np.ndarray:
    assign(metric.variables, state)
    values = [np.ravel(value) for value in keras.tree.flatten(metric.result())]
    return np.concatenate(values).astype(np.float64)


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if not np.issubdtype(other.dtype, np.floating) and other.dtype.kind in "iub":
        return bool(np.array_equal(one, other))
    # The parts are summed in another order: a few dozen numbers, so a few dozen roundings.
    rounding = 64 * (np.finfo(other.dtype).eps if other.dtype.kind == "f" else 2.0**-8)
    one, other = one.astype(np.float64), other.astype(np.float64)
    size = np.max(np.abs(other), initial=1.0, where=np.isfinite(other))
    return bool(np.allclose(one, other, rtol=0, atol=rounding * size, equal_nan=True))
