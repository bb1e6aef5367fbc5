"""Recording of the metric calls of a step: updates, their arguments, and results. Tested with Keras 3.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from hvdtrain.keras_internals.models import held_in


@dataclass(frozen=True)
class LogSource:
    """Origin of a value in the logs.

    Attributes:
        metric: Metric whose result it is.
        key: Key of the value if the result is a dict; otherwise None.
    """

    metric: keras.metrics.Metric
    key: str | None = None

    def value(self) -> Any:
        """Return the value for the current state of the metric."""
        result = self.metric.result()
        return result if self.key is None else result[self.key]


@dataclass
class Calls:
    """Calls of metrics during one run or trace of a step.

    Attributes:
        updates: Metrics that were updated, each with the (args, kwargs) of its calls.
    """

    updates: list[tuple[keras.metrics.Metric, list[tuple[Any, Any]]]] = field(default_factory=list)
    _results: list[tuple[Any, LogSource]] = field(default_factory=list)

    def sources(self, logs: Mapping[str, Any]) -> dict[str, LogSource]:
        """Return the origin of each value in `logs` that is the same object as a metric's result."""
        # The results are kept alive, so that no other object can have their id().
        known = {id(value): source for value, source in self._results}
        return {name: known[id(value)] for name, value in logs.items() if id(value) in known}

    def add_update(self, metric: keras.metrics.Metric, args: Any, kwargs: Any) -> None:
        for known, calls in self.updates:
            if known is metric:
                calls.append((args, kwargs))
                return
        self.updates.append((metric, [(args, kwargs)]))

    def add_result(self, metric: keras.metrics.Metric, result: Any) -> None:
        if isinstance(result, dict):
            self._results += [(value, LogSource(metric, key)) for key, value in result.items()]
        else:
            self._results.append((result, LogSource(metric)))


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return all metrics of a model and its layers, each once; compiled ones as the user passed them."""
    found: dict[int, keras.metrics.Metric] = {}
    held = [m for layer in model._flatten_layers() for m in layer._metrics]
    for metric in [*model.metrics, *model._get_own_metrics(), *held]:
        for one in metric.metrics if isinstance(metric, CompileMetrics) else [metric]:
            found[id(one)] = one
    return list(found.values())


def is_of_keras(metric: keras.metrics.Metric) -> bool:
    """Whether the class of a metric is Keras's own, not a subclass."""
    return type(metric).__module__.startswith("keras.src.metrics")


def is_known_to_add_up(metric: keras.metrics.Metric) -> bool:
    """Whether a metric is Keras's and always takes values per example, so that its states add up.

    Mean, Sum and MeanMetricWrapper are not: what they aggregate is up to the user.
    """
    general = (keras.metrics.Mean, keras.metrics.Sum, keras.metrics.MeanMetricWrapper)
    return is_of_keras(metric) and type(metric) not in general


def hides_state(metric: keras.metrics.Metric) -> bool:
    """Whether a metric has state that Keras does not track: in tf.Variables or Python attributes."""
    if next(held_in(vars(metric), tf.Variable), None) is not None:
        return True
    common = vars(keras.metrics.Metric())
    own = [value for name, value in vars(metric).items() if name not in common]
    in_python = (list, dict, set, int, float, np.ndarray)
    return not metric.variables and any(isinstance(value, in_python) for value in own)


@contextlib.contextmanager
def watched(metrics: Sequence[keras.metrics.Metric]) -> Iterator[Calls]:
    """Record the calls of `metrics` in this block, except those that one metric makes to another."""
    calls = Calls()
    depth = 0

    def watch(metric: keras.metrics.Metric, name: str, note: Callable[..., None]) -> None:
        original = getattr(metric, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                value = original(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                note(metric, value, args, kwargs)
            return value

        # Not by setattr, in which Keras tracks attributes.
        own = vars(metric)
        if name in own:
            undo.callback(own.update, {name: own[name]})
        else:
            undo.callback(own.pop, name)
        own[name] = call

    with contextlib.ExitStack() as undo:
        for metric in metrics:
            watch(
                metric,
                "update_state",
                lambda metric, _, args, kw: calls.add_update(metric, args, kw),
            )
            watch(metric, "result", lambda metric, value, *_: calls.add_result(metric, value))
        yield calls


@contextlib.contextmanager
def frozen(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Context in which updates of `metrics` do nothing."""
    with contextlib.ExitStack() as undo:
        for metric in metrics:
            own = vars(metric)
            if "update_state" in own:
                undo.callback(own.update, update_state=own["update_state"])
            else:
                undo.callback(own.pop, "update_state")
            own["update_state"] = lambda *args, **kwargs: None
        yield


def counted_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics that may be given one number per batch: means, sums and the user's own metrics."""
    general = [m for m in metrics_of(model) if not is_known_to_add_up(m)]
    return [m for m in general if m is not getattr(model, "_loss_tracker", None)]
