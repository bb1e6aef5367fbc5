"""Metrics over all ranks: their states are merged, rather than their results averaged.

A Keras metric's state (a sum and a count, a confusion matrix, the counters of an AUC) adds up over examples, so the
sum of the ranks' states is the state of one worker that saw all examples, and its result is exact. Other states have
rules by which they are merged (see metric_merging).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max
from hvdtrain.collectives.metric_merging import (
    FIRST,
    LAST,
    MAX,
    MEAN,
    MIN,
    SHARE,
    SUM,
    MetricState,
    declared_rule,
)
from hvdtrain.errors import ReplicaError, UsageError, warn_user
from hvdtrain.keras_internals.variables import assign, identity, tf_variable, unique


def state_variables(metrics: Sequence[keras.metrics.Metric]) -> list[Any]:
    """Return the variables of `metrics`, each once."""
    return unique(v for metric in metrics for v in metric.variables)


def check_additive(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Check that the states of `metrics` start from zero, for strategies that always add them up.

    Any other start value (of a running minimum, for example) would be counted once per rank. Call after `reset_state`.

    Raises:
        UsageError: A state starts from another value, and its variable declares no aggregation.
    """
    for variable in state_variables(metrics):
        if declared_rule(variable) is None and np.any(tf_variable(variable).numpy()):
            raise UsageError(
                f"The metric state {variable.path!r} starts from a value that is not zero, so the states of several "
                "workers cannot be added up. Create the variable with aggregation='mean' or 'only_first_replica', "
                "train with strategy='horovod' without a layout, or compute the metric with trainer.predict."
            )


def read_state(metrics: Sequence[keras.metrics.Metric]) -> MetricState:
    """Return the values of all state variables of `metrics`."""
    return [tf_variable(v).numpy() for v in state_variables(metrics)]


def write_state(metrics: Sequence[keras.metrics.Metric], state: MetricState) -> None:
    """Set all state variables of `metrics` to values that `read_state` returned."""
    assign(state_variables(metrics), state)


def merge_state(
    metrics: Sequence[keras.metrics.Metric],
    process_set: Communicator = ALL_RANKS,
    rules: Mapping[int, str] | None = None,
    share: float | None = None,
) -> None:
    """Replace the state of `metrics` on every rank by the merged state of all ranks. A collective.

    Sums are computed in float64. A variable's aggregation overrides `rules`: "mean" is averaged, and for
    "only_first_replica" the first rank's value is used.

    Args:
        metrics: Metrics, the same on all ranks.
        process_set: Ranks to merge over.
        rules: Rules of the states that do not add up, by the id() of the tf.Variable (see metric_merging).
        share: This rank's share of the last step, for the rule "last". Default: equal shares.

    Raises:
        ReplicaError: On all ranks: their rules differ.
    """
    variables = state_variables(metrics)
    ranks = process_set.size()
    if ranks == 1 or not variables:
        return
    found = [declared_rule(v) or (rules or {}).get(identity(v), SUM) for v in variables]
    factors = {
        SUM: 1.0,
        SHARE: 1.0,
        MEAN: 1.0 / ranks,
        LAST: 1.0 / ranks if share is None else share,
        FIRST: float(process_set.rank() == 0),
    }
    values = [tf.cast(tf.reshape(tf_variable(v), [-1]), tf.float64) for v in variables]
    # All ranks send everything, whatever the rules, so that a difference is detected.
    sums = [
        value * factors[rule] if factors.get(rule) else tf.zeros_like(value)
        for value, rule in zip(values, found, strict=True)
    ]
    total = process_set.allreduce(
        tf.concat([tf.constant([_fingerprint(found)], tf.float64), *sums], 0), "hvdtrain_metrics"
    )
    if float(total[0]) != ranks * _fingerprint(found):
        raise ReplicaError(
            "The metrics, or the steps that update them, differ between the ranks, so their states cannot be "
            "combined. Every rank must run the same script"
        )
    parts = tf.split(total[1:], [value.shape[0] for value in values])
    signs = {MAX: 1.0, MIN: -1.0}
    extremes = [i for i, rule in enumerate(found) if rule in signs]
    if extremes:
        signed = [signs[found[i]] * values[i] for i in extremes]
        largest = process_set.allreduce(tf.concat(signed, 0), "hvdtrain_metrics_max", Max)
        sizes = [values[i].shape[0] for i in extremes]
        for i, part in zip(extremes, tf.split(largest, sizes), strict=True):
            parts[i] = signs[found[i]] * part
    for variable, part in zip(variables, parts, strict=True):
        target = tf_variable(variable)
        target.assign(tf.cast(tf.reshape(part, target.shape), target.dtype))


def without_sums(
    metrics: Sequence[keras.metrics.Metric], rules: Mapping[int, str] | None = None
) -> None:
    """Set all states to 0 that `merge_state` with the same `rules` would add up.

    If every rank holds the states of one process, and all ranks but one call this, merging gives these states again.
    """
    for variable in state_variables(metrics):
        target = tf_variable(variable)
        rule = declared_rule(variable) or (rules or {}).get(id(target), SUM)
        if rule in (SUM, SHARE):
            target.assign(tf.zeros_like(target))


def _fingerprint(rules: Sequence[str]) -> float:
    """Return a checksum of `rules`: an integer that float64 sums exactly."""
    return float(zlib.crc32(" ".join(rules).encode()))


def as_value(result: Any) -> float | np.ndarray:
    """Return a metric's result as Keras does: a float, or an array if it is one (F1Score, also of a single class)."""
    value = np.asarray(result)
    return value if value.shape else float(value)


def average_logs(
    logs: Mapping[str, Any],
    examples: int,
    process_set: Communicator = ALL_RANKS,
    known: Callable[[Sequence[str]], Mapping[str, Any]] = lambda names: {},
) -> dict[str, Any]:
    """Combine over the ranks the values that a step returns and that are not results of metrics. A collective.

    A value that is the same on all ranks with examples (a learning rate) is left unchanged, bit for bit; others are
    averaged, weighted by `examples`, with a warning, because one worker would have had the value of the whole batch.

    Args:
        logs: Values by name; the names are the same on all ranks.
        examples: Number of examples of this rank in the step.
        process_set: Ranks to combine over.
        known: Returns, for some of the given names, the exact values of one worker. A collective.

    Returns:
        The combined values by name: floats or arrays.
    """
    if not logs:
        return {}
    names = sorted(logs)
    arrays = [np.asarray(logs[name], np.float64) for name in names]
    mine = np.concatenate([array.ravel() for array in arrays])
    ends = np.cumsum([array.size for array in arrays])
    everyone = np.concatenate([mine, -mine])
    busy = everyone if examples else np.full(2 * mine.size, -np.inf)
    bounds = process_set.allreduce(np.concatenate([busy, everyone]), "hvdtrain_logs_range", Max)
    largest, least, largest_of_all, least_of_all = np.split(bounds.numpy(), 4)
    weighted = mine * examples if examples else np.zeros_like(mine)
    mine_and_count = np.array([*weighted, float(examples)])
    *total, count = process_set.allreduce(mine_and_count, "hvdtrain_logs").numpy()
    same, common = largest == -least, largest_of_all == -least_of_all
    values = np.where(same, largest, np.array(total) / count)
    places = {
        name: slice(end - array.size, end)
        for name, array, end in zip(names, arrays, ends, strict=True)
    }
    found = {
        name: as_value(values[place].reshape(array.shape))
        for (name, place), array in zip(places.items(), arrays, strict=True)
    }
    differing = [name for name, place in places.items() if not np.all(same[place])]
    # A value that depends on metric states differs on idle ranks, too; one that depends on the step number does not.
    asked = [name for name, place in places.items() if not np.all(common[place])]
    exact = known(asked) if asked else {}
    found |= exact
    for name in differing:
        if name not in exact and process_set.rank() == 0:
            warn_user(
                f"The step returns {name!r}, which is not the result of a metric and differs "
                "between the workers: the log shows the average of their values in the last step, "
                "weighted by examples. For a mean over the batch this equals the value on one "
                "worker; keep anything else in a keras.metrics.Metric and return its result()"
            )
    return found
