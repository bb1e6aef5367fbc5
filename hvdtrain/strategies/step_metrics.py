"""Metrics in a step on a part of a batch: how their states combine over ranks, and which logs are their results.

While a step is traced (or first runs eagerly), its calls of metrics are recorded. Each metric is then tested once on
made-up numbers in the shapes of those calls (collectives/metric_merging.py), which takes about 10 ms; Keras's metrics
that are known to add up are not tested. States that count by the share of the batch are weighted in the step itself,
and integers that count steps count a step in several parts once; all others are handled when the states are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator, Min
from hvdtrain.collectives.metric_merging import (
    LAST,
    RULES,
    SHARE,
    SUM,
    Finding,
    Trial,
    Updates,
    can_be_weighted,
    find_rules,
)
from hvdtrain.collectives.metric_trials import has_scalars, make_trials
from hvdtrain.collectives.metrics import (
    as_value,
    average_logs,
    merge_state,
    read_state,
    state_variables,
    write_state,
)
from hvdtrain.data import Share
from hvdtrain.errors import warn_user
from hvdtrain.keras_internals.metric_calls import (
    LogSource,
    hides_state,
    is_known_to_add_up,
    watched,
)
from hvdtrain.keras_internals.models import flat_logs, metric_results, metrics_or_logs
from hvdtrain.keras_internals.variables import identities, identity, tf_variable
from hvdtrain.strategies.state_logs import StateLogs


class StepLogs(dict[str, Any]):
    """The logs of a step on this rank.

    Attributes:
        sources: Sources of the logs that are results of metrics; the others are values of the last step.
        rules: How the metrics' states combine, by the id of the tf.Variable.
        of_states: Finds logs that depend on the metrics' states in another way.
    """

    def __init__(
        self,
        logs: Mapping[str, Any],
        sources: Mapping[str, LogSource],
        rules: Mapping[int, str],
        of_states: StateLogs | None = None,
    ) -> None:
        super().__init__(logs)
        self.sources = sources
        self.rules = rules
        self.of_states = of_states


class StepMetrics:
    """The metrics of a model in one of its steps; training and test may call a metric differently.

    Args:
        metrics: Metrics of the built and compiled model and of its layers.
        share: This rank's share of the global batch, a float32 scalar.
        warn: Receives warnings about metrics that do not combine exactly.
        in_parts: Whether a step updates the metrics several times, with one part of this rank's share after the other.

    Attributes:
        rules: Rules found so far for states that do not add up, by the id of the tf.Variable.
        sources: Sources of the logs that are results of metrics, of a step that `over` has wrapped.
    """

    def __init__(
        self,
        metrics: Sequence[keras.metrics.Metric],
        share: tf.Variable,
        warn: Callable[[str], None],
        in_parts: bool = False,
    ) -> None:
        # A state merged by "last" would keep the value of the last part only.
        self._allowed = [rule for rule in RULES if not (in_parts and rule == LAST)]
        self._in_parts = in_parts
        self._metrics = metrics
        self._share = share
        self._warn = warn
        self._tried: set[int] = set()
        self._sums: set[int] = set()
        self.rules: dict[int, str] = {}
        self.sources: dict[str, LogSource] = {}
        states = state_variables(metrics)
        self._targets = [tf_variable(v) for v in states if in_parts or can_be_weighted(v)]
        self._counters: dict[int, tf.Variable] = {}
        """By the id of the tf.Variable of a counter of steps, its value when the current step began."""

    def count_as_sums(self, variables: Sequence[tf.Variable]) -> None:
        """Treat numbers per batch that metrics add to `variables` as sums over the examples."""
        self._sums = {id(v) for v in variables}

    def begin_step(self) -> None:
        """Begin a step whose parts `count` will count."""
        for target in self._targets:
            if (begun := self._counters.get(id(target))) is not None:
                begun.assign(target)

    def over(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `step` in `count`, and note the sources of its logs."""

        def counted(data: Any) -> Any:
            logs, found = self.count(lambda: step(data), tf.nest.flatten(data)[0].shape[0])
            self.sources.update(found)
            return logs

        return counted

    def count(self, work: Callable[[], Any], examples: int) -> tuple[Any, dict[str, LogSource]]:
        """Run `work`, which updates the metrics with `examples` examples; weight the states that count by the share.

        Returns:
            The logs that `work` returned, and the sources of those that are results of metrics.
        """
        before = [target.read_value() for target in self._targets]
        with watched(self._metrics) as calls:
            logs = flat_logs(work())
        for metric, updates in calls.updates:
            if id(metric) not in self._tried and not is_known_to_add_up(metric):
                self._tried.add(id(metric))
                counters = self._learn(metric, updates, examples)
                self._add_counters(counters, before)
        for target, value in zip(self._targets, before, strict=True):
            if self.rules.get(id(target)) == SHARE:
                target.assign(value + tf.cast(self._share, value.dtype) * (target - value))
            elif (begun := self._counters.get(id(target))) is not None:
                target.assign(begun + (target - value))
        return logs, calls.sources(logs)

    def logs(self, logs: Mapping[str, Any], of_states: StateLogs | None = None) -> StepLogs:
        """Return the logs of a step, together with the sources and rules found so far."""
        return StepLogs(logs, self.sources, self.rules, of_states)

    def _add_counters(self, counters: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> None:
        """Note the values of counters before the first part of the first step, which is being run or traced."""
        is_run = tf.executing_eagerly()
        for target, value in zip(self._targets, before, strict=True):
            if any(target is counter for counter in counters):
                with tf.init_scope():
                    begun = value if is_run else target.read_value()
                    self._counters[id(target)] = tf.Variable(begun, trainable=False)

    def _learn(
        self, metric: keras.metrics.Metric, calls: Updates, examples: int
    ) -> list[tf.Variable]:
        """Find the rules of a metric; return those of its states that count the steps and not the parts of a step."""
        if hides_state(metric):
            self._warn(
                f"The metric {metric.name!r} keeps its state in a tf.Variable or in Python, where "
                "it cannot be combined: each worker shows the value for its own examples. Let it "
                "keep sums over examples in variables created by self.add_weight()"
            )
            return []
        states = identities(metric.variables)
        if states and states <= self._sums:
            return []  # The default rule holds, as for a mean weighted by its number of examples.
        is_mean = isinstance(metric, keras.metrics.Mean)
        telling = {identity(metric.total)} if is_mean else states
        seen = bool(telling & self._sums)
        # One number per batch is a mean (of losses), unless the probe has seen otherwise or the metric is a sum.
        adds_up = seen or not is_mean
        try:
            with tf.init_scope():
                trials = make_trials(calls, examples, adds_up)
                finding = find_rules(metric, trials, self._allowed)
                counters = _counters(metric, trials[0]) if self._in_parts else []
        except Exception as error:
            self._warn(_untested(metric, error))
            return []
        for variable, rule in zip(metric.variables, finding.rules, strict=True):
            if rule != SUM:
                self.rules[identity(variable)] = rule
        if not finding.exact:
            self._warn(_complaint(metric, finding))
        elif adds_up and not seen and has_scalars(calls):
            self._warn(
                f"The metric {metric.name!r} receives one number for a batch, but each worker has "
                "only a part of the batch: the number is treated as a sum over the examples. If "
                "it is anything else, pass the metric one value per example"
            )
        return counters


class SummedMetrics:
    """Metrics of a strategy that can only sum their states; warns where that is not exact.

    Args:
        parts: Division of a batch, as for `make_trials`.
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._parts = parts
        self._tried: set[int] = set()

    def learn(self, updates: Sequence[tuple[keras.metrics.Metric, Updates]], examples: int) -> None:
        """Test the metrics that a step on `examples` examples has updated, each once."""
        for metric, calls in updates:
            if id(metric) in self._tried or is_known_to_add_up(metric):
                continue
            self._tried.add(id(metric))
            try:
                found = [self._try(metric, calls, examples, adds_up) for adds_up in (False, True)]
                exact = any(np.allclose(f.one, f.several, 1e-3, equal_nan=True) for f in found)
            except Exception as error:
                warn_user(_untested(metric, error))
                continue
            if not exact:
                warn_user(_complaint(metric, found[0]))

    def _try(
        self, metric: keras.metrics.Metric, calls: Updates, examples: int, adds_up: bool
    ) -> Finding:
        with tf.init_scope():
            return find_rules(metric, make_trials(calls, examples, adds_up, self._parts), [SUM])


def merged_logs(
    model: keras.Model, step_logs: Mapping[str, Any], share: Share, process_set: Communicator
) -> dict[str, Any]:
    """Return the logs since the metrics' reset, as one worker would have them, on all ranks of `process_set`.

    A collective. As in Keras, the logs are the results of the model's metrics if the step returned their names, and
    otherwise what the last step returned: merged results of metrics, and other values combined over the ranks (see
    `average_logs`).

    Args:
        model: Model whose metrics are merged.
        step_logs: Logs of the last step; StepLogs if there is more than one rank.
        share: Share of the last step.
        process_set: Ranks that share each batch.
    """
    if process_set.size() == 1:
        return {n: as_value(v) for n, v in metrics_or_logs(model, dict(step_logs)).items()}
    if not isinstance(step_logs, StepLogs):
        step_logs = StepLogs(step_logs, {}, {})
    by_value = _by_value(model, step_logs, share, process_set)
    sources, of_states = step_logs.sources, step_logs.of_states
    listed = {id(v) for v in state_variables(model.metrics)}
    metrics = [source.metric for source in sources.values()]
    # Keras does not reset metrics that the model does not list: they continue from this rank's own state.
    unlisted = [m for m in metrics if not listed.issuperset(map(id, m.variables))]
    kept = read_state(unlisted)
    part = share.examples / share.global_examples
    merge_state([*model.metrics, *unlisted], process_set, step_logs.rules, part)
    merged = metric_results(model)
    if step_logs.keys() != merged.keys():
        known = {n: merged[n] for n in by_value} | {n: s.value() for n, s in sources.items()}
        others = {name: value for name, value in step_logs.items() if name not in known}
        known |= _totals(others, of_states, share, process_set)
        others = {name: value for name, value in others.items() if name not in known}
        known |= average_logs(
            others,
            share.examples,
            process_set,
            lambda names: {} if of_states is None else of_states.values(names, share.data),
        )
        merged = {name: known[name] for name in step_logs}
    found = {name: as_value(value) for name, value in merged.items()}
    write_state(unlisted, kept)
    return found


def _totals(
    logs: Mapping[str, Any], of_states: StateLogs | None, share: Share, process_set: Communicator
) -> dict[str, Any]:
    """Return those of `logs` that are sums over the examples of a step, summed over the ranks."""
    names = of_states.sums(sorted(logs), share.data) if of_states is not None and logs else []
    own = [np.asarray(logs[name], np.float64) for name in names]
    if not share.examples:
        own = [np.zeros_like(value) for value in own]
    totals = process_set.grouped_allreduce(own, "hvdtrain_log_sums") if names else []
    return dict(zip(names, totals, strict=True))


def _by_value(
    model: keras.Model, logs: StepLogs, share: Share, process_set: Communicator
) -> list[str]:
    """Return the logs with the name and value of a metric on each rank, whose source a compiled function hides."""
    own = metric_results(model)
    names = [name for name in logs if name not in logs.sources and name in own]
    if not names:
        return []
    same = [not share.examples or np.array_equal(own[n], logs[n]) for n in names]
    votes = process_set.allreduce(np.array(same, np.int32), "hvdtrain_log_names", Min).numpy()
    return [name for name, vote in zip(names, votes, strict=True) if vote]


def _counters(metric: keras.metrics.Metric, trial: Trial) -> list[tf.Variable]:
    """Return the integers that grow by the same number in every step, whatever its examples; restore the state."""
    own = read_state([metric])
    metric.reset_state()
    states = [read_state([metric])]
    for updates in trial.whole:
        for args, kwargs in updates:
            metric.update_state(*args, **kwargs)
        states.append(read_state([metric]))
    write_state([metric], own)
    growths = [np.diff(values, axis=0) for values in zip(*states, strict=True)]
    return [
        tf_variable(variable)
        for variable, growth in zip(state_variables([metric]), growths, strict=True)
        if not can_be_weighted(variable) and np.any(growth) and np.all(growth == growth[0])
    ]


def _untested(metric: keras.metrics.Metric, error: Exception) -> str:
    return (
        f"The metric {metric.name!r} could not be tested ({type(error).__name__}: {error}). Its states on several "
        "workers are added up, which is right only for counts and sums over examples"
    )


def _complaint(metric: keras.metrics.Metric, finding: Finding) -> str:
    far = int(np.nanargmax(np.abs(finding.one - finding.several)))
    return (
        f"The metric {metric.name!r} of the parts of a batch does not combine into that of the "
        f"whole batch: with made-up numbers it is {finding.one[far]:.4g} on one worker and "
        f"{finding.several[far]:.4g} on several. Training is not affected. Let it return one "
        "value per example, or keep sums over examples in its variables and divide them in "
        "result() (as keras.metrics.RootMeanSquaredError does)"
    )
