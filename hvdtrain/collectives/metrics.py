"""Metrics over all ranks: the states are merged, not the results averaged.

A Keras metric's state (a sum and a count, a confusion matrix, the counters of an AUC) adds up over examples, so the
sum of the ranks' states is the state of one worker that saw all examples, and its result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.variables import tf_variable, unique

State = list[np.ndarray]


def state_variables(metrics: Sequence[keras.metrics.Metric]) -> list[Any]:
    """Return the variables of `metrics`, each once."""
    return unique(v for metric in metrics for v in metric.variables)


def check_additive(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Raise UsageError for a metric whose states cannot be added up. Call after `reset_state`.

    A state that starts from something other than zero (a running minimum, say) would be counted once a rank.
    """
    for metric in metrics:
        for variable in metric.variables:
            if _aggregation(variable) == "sum" and np.any(tf_variable(variable).numpy()):
                raise UsageError(
                    f"The metric state {variable.path!r} starts from a value that is not zero, so the states "
                    "of several workers cannot be added up. Create the variable with aggregation='mean' "
                    "or 'only_first_replica', or compute the metric with trainer.predict."
                )


def read_state(metrics: Sequence[keras.metrics.Metric]) -> State:
    """Return the values of all state variables."""
    return [tf_variable(v).numpy() for v in state_variables(metrics)]


def write_state(metrics: Sequence[keras.metrics.Metric], state: State) -> None:
    """Set all state variables, as `read_state` returned them."""
    for variable, value in zip(state_variables(metrics), state, strict=True):
        tf_variable(variable).assign(value)


def merge_state(
    metrics: Sequence[keras.metrics.Metric], process_set: hvd.ProcessSet = hvd.global_process_set
) -> None:
    """Replace the state of `metrics` on every rank of `process_set` by that of all of them together. A collective.

    Sums are made in float64. Variables with aggregation "mean" are averaged; those with "only_first_replica"
    or "none" become those of the first rank.
    """
    variables = state_variables(metrics)
    ranks = process_set.size()
    if ranks == 1 or not variables:
        return
    weights = {"sum": 1.0, "mean": 1.0 / ranks}
    own = 1.0 if process_set.rank() == 0 else 0.0
    values = [
        tf.cast(tf.reshape(tf_variable(v), [-1]), tf.float64) * weights.get(_aggregation(v), own)
        for v in variables
    ]
    flat = tf.concat(values, axis=0)
    total = hvd.allreduce(flat, op=hvd.Sum, name="hvdtrain_metrics", process_set=process_set)
    parts = tf.split(total, [tf_variable(v).shape.num_elements() for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        target = tf_variable(variable)
        target.assign(tf.cast(tf.reshape(part, target.shape), target.dtype))


def as_value(result: Any) -> float | np.ndarray:
    """Return a metric's result as a float, or as an array if it holds several numbers (F1Score of each class)."""
    value = np.asarray(result)
    return float(value.reshape(())) if value.size == 1 else value


def average_logs(
    logs: dict[str, Any], examples: int, process_set: hvd.ProcessSet = hvd.global_process_set
) -> dict[str, Any]:
    """Return `logs` averaged over the ranks of `process_set`, weighted by `examples`. A collective.

    For what a user's own train_step returns beside the model's metrics.
    """
    names = sorted(logs)
    values = [np.asarray(logs[name], np.float64) for name in names]
    weighted = [(v * examples if examples else np.zeros_like(v)).ravel() for v in values]
    mine = tf.constant(np.concatenate([*weighted, [float(examples)]]))
    total = hvd.allreduce(mine, op=hvd.Sum, name="hvdtrain_logs", process_set=process_set).numpy()
    parts = np.split(total[:-1] / total[-1], np.cumsum([v.size for v in values])[:-1])
    return {
        name: as_value(part.reshape(value.shape))
        for name, value, part in zip(names, values, parts, strict=True)
    }


def _aggregation(variable: Any) -> str:
    return getattr(variable, "aggregation", "sum") or "sum"
