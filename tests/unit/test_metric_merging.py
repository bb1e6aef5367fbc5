"""How metrics' states combine over workers: what is found by trying, against one metric that saw whole batches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import metrics, ops

from hvdtrain.collectives.metric_merging import SHARE, Finding, combine, find_rules
from hvdtrain.collectives.metric_trials import EVEN_PARTS, WHOLE_PARTS, make_trials
from hvdtrain.keras_internals.metric_calls import metrics_of, watched
from hvdtrain.strategies.step_metrics import StepMetrics, SummedMetrics

CLASSES = 3
ROWS = 4


def tensor(*shape: int | None, dtype: str = "float32") -> Any:
    return keras.KerasTensor(shape, dtype)


FLOATS = (tensor(ROWS, CLASSES), tensor(ROWS, CLASSES))
LABELS = (tensor(ROWS, dtype="int64"), tensor(ROWS, CLASSES))
BINARY = (tensor(ROWS, 1), tensor(ROWS, 1))
INTEGERS = (tensor(ROWS, dtype="int32"), tensor(ROWS, dtype="int32"))
VALUES = (tensor(ROWS),)
ARGUMENTS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "AUC": (BINARY, {}),
    "IoU": (INTEGERS, {"num_classes": 2, "target_class_ids": [1]}),
    "BinaryIoU": (BINARY, {}),
    "MeanIoU": (INTEGERS, {"num_classes": 2}),
    "OneHotIoU": (FLOATS, {"num_classes": CLASSES, "target_class_ids": [1]}),
    "OneHotMeanIoU": (FLOATS, {"num_classes": CLASSES}),
    "SensitivityAtSpecificity": (BINARY, {"specificity": 0.5}),
    "SpecificityAtSensitivity": (BINARY, {"sensitivity": 0.5}),
    "PrecisionAtRecall": (BINARY, {"recall": 0.5}),
    "RecallAtPrecision": (BINARY, {"precision": 0.5}),
    "SparseCategoricalAccuracy": (LABELS, {}),
    "SparseCategoricalCrossentropy": (LABELS, {}),
    "SparseTopKCategoricalAccuracy": (LABELS, {"k": 2}),
    "Mean": (VALUES, {}),
    "Sum": (VALUES, {}),
    "MeanMetricWrapper": (FLOATS, {"fn": keras.losses.mean_squared_error}),
    "ConcordanceCorrelation": (FLOATS, {}),
    "PearsonCorrelation": (FLOATS, {}),
}
ALL = sorted(
    name
    for name, value in vars(metrics).items()
    if inspect.isclass(value) and issubclass(value, metrics.Metric) and value is not metrics.Metric
)


def findings(
    metric: metrics.Metric, *arguments: Any, adds_up: bool = False, **named: Any
) -> Finding:
    return find_rules(metric, make_trials([(arguments, named)], ROWS, adds_up))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_keras_add_up(name: str, weighted: bool) -> None:
    arguments, options = ARGUMENTS.get(name, (FLOATS, {}))
    metric = getattr(metrics, name)(**options)
    weights = {"sample_weight": tensor(ROWS)} if weighted else {}
    found = findings(metric, *arguments, **weights)
    assert found.exact, found
    assert set(found.rules) == {"sum"}
    assert not any(np.any(v.numpy()) for v in metric.variables)  # As it was.


class Extreme(metrics.Metric):
    """A running maximum or minimum, that begins at `begin` or, as Keras's own reset_state has it, at 0."""

    def __init__(self, function: Any, begin: float | None = None, **options: Any) -> None:
        super().__init__(name="extreme")
        self.function, self.begin = function, begin
        self.value = self.add_variable((), "zeros", name="value", **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        whole = ops.max(y_pred) if self.function is ops.maximum else ops.min(y_pred)
        self.value.assign(self.function(self.value, ops.cast(whole, self.value.dtype)))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)

    def reset_state(self) -> None:
        self.value.assign(self.begin or 0.0)


class Counter(Extreme):
    """Counts steps."""

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        super().__init__(None, dtype=dtype, **options)

    def update_state(self, *_: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(ops.ones((), self.value.dtype))


class Latest(Extreme):
    """The mean prediction of the last batch."""

    def __init__(self) -> None:
        super().__init__(None)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.mean(y_pred))


class Dice(metrics.Metric):
    """The mean over batches of a ratio of sums: no rule makes it from parts."""

    def __init__(self) -> None:
        super().__init__(name="dice")
        self.total = self.add_variable((), "zeros")
        self.batches = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        both = ops.sum(y_true * y_pred)
        self.total.assign_add(2 * both / (ops.sum(y_true) + ops.sum(y_pred)))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.batches


def masked_accuracy(y_true: Any, y_pred: Any) -> Any:
    """As in TensorFlow's text tutorials: one number for a batch."""
    mask = ops.cast(y_true != 0, "float32")
    return ops.sum(ops.cast(ops.round(y_pred) == y_true, "float32") * mask) / ops.sum(mask)


def rmse(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def mean_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


OWN: dict[str, tuple[Callable[[], metrics.Metric], tuple[str, ...]]] = {
    "largest, from 0": (lambda: Extreme(ops.maximum), ("max",)),
    "largest, from far below": (lambda: Extreme(ops.maximum, -1e9), ("max",)),
    "least": (lambda: Extreme(ops.minimum, 1e9), ("min",)),
    "steps": (Counter, ("share",)),
    "steps as an integer": (lambda: Counter("int32"), ("max",)),
    "last value": (Latest, ("last",)),
    "mean error of a batch": (lambda: metrics.MeanMetricWrapper(mean_error), ("share", "share")),
    "says mean": (lambda: Counter(aggregation="mean"), ("mean",)),
    "says first": (lambda: Counter(aggregation="only_first_replica"), ("first",)),
}


@pytest.mark.parametrize("name", OWN)
def test_own_metrics_that_combine(name: str) -> None:
    make, rules = OWN[name]
    found = findings(make(), *FLOATS)
    assert (found.exact, found.rules) == (True, rules)


@pytest.mark.parametrize(
    "make",
    [
        Dice,
        lambda: metrics.MeanMetricWrapper(rmse),
        lambda: metrics.MeanMetricWrapper(masked_accuracy),
    ],
)
def test_own_metrics_that_do_not(make: Callable[[], metrics.Metric]) -> None:
    found = findings(make(), *FLOATS)
    assert not found.exact
    # The nearest rule is that of a mean: far less wrong than counting each worker's batch.
    assert set(found.rules) == {SHARE}
    assert 1e-4 < np.max(np.abs(found.one - found.several)) < 0.1


def test_numbers_for_a_batch() -> None:
    loss = tensor()
    assert findings(metrics.Mean(), loss).rules == ("share", "share")
    # Weighted by the number of examples, as Keras's own loss tracker is.
    for size in (ROWS, tensor(dtype="int32"), tensor()):
        assert findings(metrics.Mean(), loss, sample_weight=size).rules == ("sum", "sum")
    assert findings(metrics.Sum(), loss, adds_up=True).rules == ("sum",)
    assert findings(metrics.Mean(), tensor(None)).rules == ("sum", "sum")  # Any number of values.


KINDS: dict[str, Callable[[], metrics.Metric]] = {
    **{name: make for name, (make, _) in OWN.items() if not name.startswith("says")},
    "mse": metrics.MeanSquaredError,
    "auc": lambda: metrics.AUC(num_thresholds=20),
    "f1": lambda: metrics.F1Score(threshold=0.5),
    "r2": metrics.R2Score,
    "root": metrics.RootMeanSquaredError,
}
RULES = {name: findings(make(), *FLOATS).rules for name, make in KINDS.items()}


@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), workers=st.integers(1, 3))
def test_any_split_makes_the_state_of_one_worker(
    data: st.DataObject, kind: str, workers: int
) -> None:
    """Metrics of as many workers, each updated with its part; the last one always has one."""
    sizes = [
        [*data.draw(st.lists(st.integers(0, 4), min_size=workers - 1, max_size=workers - 1)), last]
        for last in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    one, several = KINDS[kind](), [KINDS[kind]() for _ in range(workers)]
    for metric in (one, *several):
        # Some of Keras's make their variables with the first update.
        metric.update_state(np.ones((1, CLASSES), "float32"), np.ones((1, CLASSES), "float32"))
        metric.reset_state()
    for step in sizes:
        y = random.integers(0, 2, (sum(step), CLASSES)).astype("float32")
        p = random.uniform(size=y.shape).astype("float32")
        one.update_state(y, p)
        ends = np.cumsum(step)
        for metric, size, end in zip(several, step, ends, strict=True):
            if not size:
                continue
            before = [v.numpy() for v in metric.variables]
            metric.update_state(y[end - size : end], p[end - size : end])
            for variable, value, rule in zip(metric.variables, before, RULES[kind], strict=True):
                if rule == SHARE:
                    grown = variable.numpy() - value
                    variable.assign(value + size / sum(step) * grown)
    shares = [size / sum(sizes[-1]) for size in sizes[-1]]
    states = [[v.numpy() for v in metric.variables] for metric in several]
    for index, (rule, variable) in enumerate(zip(RULES[kind], one.variables, strict=True)):
        merged = combine(rule, [state[index] for state in states], shares)
        # Up to 48 float32 numbers, summed in another order.
        np.testing.assert_allclose(merged, variable.numpy(), rtol=48 * 2.0**-23, atol=1e-6)


def test_what_cannot_be_tried_says_why() -> None:
    class Picky(Extreme):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            tf.debugging.assert_greater(y_pred, 5.0)

    metric = Picky(ops.maximum)
    metric.value.assign(3.0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        findings(metric, *FLOATS)
    assert float(metric.value) == 3.0


def test_calls_and_results_are_noted() -> None:
    class Two(metrics.Metric):
        """Its calls of another metric are its own business."""

        def __init__(self) -> None:
            super().__init__(name="two")
            self.inner = metrics.Mean()

        def update_state(self, value: Any) -> None:
            self.inner.update_state(value)

        def result(self) -> dict[str, Any]:
            return {"mean": self.inner.result(), "double": 2 * self.inner.result()}

    two = Two()
    with watched([two, two.inner]) as calls:
        two.update_state(3.0)
        found = two.result()
    sources = calls.sources(found | {"other": found["mean"] + 0})
    assert [metric for metric, _ in calls.updates] == [two]
    assert {name: float(source.value()) for name, source in sources.items()} == {
        "mean": 3.0,
        "double": 6.0,
    }
    assert not {"update_state", "result"} & vars(two).keys()


@pytest.mark.parametrize("parts", [EVEN_PARTS, WHOLE_PARTS])
@pytest.mark.parametrize(
    "make, arguments, warned",
    [
        (lambda: Extreme(ops.maximum), FLOATS, True),
        (Latest, FLOATS, True),
        (metrics.Mean, [tensor()], False),
        (metrics.Mean, [tensor(ROWS)], False),
        (metrics.MeanSquaredError, FLOATS, False),
    ],
)
def test_where_states_can_only_be_added_up(
    make: Callable[[], metrics.Metric], arguments: Any, warned: bool, parts: Any
) -> None:
    summed, metric = SummedMetrics(parts), make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            summed.learn([(metric, [(arguments, {})])], ROWS)
    assert len(caught) == warned
    assert all(repr(metric.name) in str(each.message) for each in caught)
    assert not any(np.any(v.numpy()) for v in metric.variables)


class Untestable(metrics.Sum):
    """Takes but what its own model gives it."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        raise ValueError("these are no labels of mine")


def test_one_that_cannot_be_tested_is_named() -> None:
    summed, metric = SummedMetrics(EVEN_PARTS), Untestable(name="own")
    with pytest.warns(
        UserWarning, match="'own' could not be tested .*no labels of mine.* added up"
    ):
        summed.learn([(metric, [([tensor(ROWS)], {})])], ROWS)


def test_a_warning_that_is_made_an_error_is_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="does not combine"):
            SummedMetrics(EVEN_PARTS).learn([(Latest(), [(FLOATS, {})])], ROWS)


class InVariable(keras.metrics.Metric):
    """Counts in a variable that Keras does not track."""

    def __init__(self) -> None:
        super().__init__(name="hidden")
        self.total = tf.Variable(0.0)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(p))

    def result(self) -> Any:
        return self.total


class InPython(keras.metrics.Metric):
    """Keeps a list, as run_eagerly allows."""

    def __init__(self) -> None:
        super().__init__(name="hidden")
        self.seen: list[float] = []

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.seen.append(float(tf.reduce_sum(p)))

    def result(self) -> Any:
        return sum(self.seen)


@pytest.mark.parametrize("kind", [InVariable, InPython])
def test_what_keras_does_not_know_is_told(kind: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.hidden = hidden = kind()
    model.compile("sgd", "mse")
    step_metrics = StepMetrics(metrics_of(model), tf.Variable(0.5), warnings.warn)
    with pytest.warns(UserWarning, match=r"'hidden' keeps its state.*self\.add_weight"):
        step_metrics.count(lambda: hidden.update_state(None, np.ones((2, 2), "float32")) or {}, 2)
