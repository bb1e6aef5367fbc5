"""Metrics whose states combine in other ways than by adding up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


class Extreme(keras.metrics.Metric):
    def __init__(self, name: str, begin: float, function: Callable[..., Any]) -> None:
        super().__init__(name=name)
        self.begin, self.function = begin, function
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(self.function(self.value, y_pred))

    def result(self) -> Any:
        # Not the variable itself: Keras would log what the evaluation behind the epoch leaves in it.
        return self.value + 0.0

    def reset_state(self) -> None:
        self.value.assign(self.begin)


def own_metrics() -> list[Any]:
    """Sums, extremes, and numbers that count by batches."""

    def mean_error(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred))

    return [
        Extreme("largest", 0.0, lambda value, p: ops.maximum(value, ops.max(p))),
        Extreme("largest_of_all", -1e9, lambda value, p: ops.maximum(value, ops.max(p))),
        Extreme("least", 1e9, lambda value, p: ops.minimum(value, ops.min(p))),
        Extreme("steps", 0.0, lambda value, _: value + 1.0),
        Extreme("examples", 0.0, lambda value, p: value + ops.cast(ops.shape(p)[0], "float32")),
        mean_error,
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.R2Score(),
    ]


def last_value() -> keras.metrics.Metric:
    return Extreme("last", 0.0, lambda _, p: ops.mean(p))
