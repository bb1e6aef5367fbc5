"""Parameter servers, the parts that need no process: places of variables, gradients of parts, the watch."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.collectives.finite import not_finite
from hvdtrain.data import Share
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.keras_internals.building import build_model
from hvdtrain.keras_internals.remote_variables import (
    SplitVariable,
    StepVariable,
    in_step,
    make_step_variable,
    split_value,
    tf_variables,
    update_where_variables_are,
)
from hvdtrain.keras_internals.variables import unique, without
from hvdtrain.strategies.parameter_server import ParameterServer
from hvdtrain.strategies.parameter_server.async_steps import AsyncSteps
from hvdtrain.strategies.parameter_server.connection import (
    Watch,
    wait_for_all,
    without_tracebacks,
)
from hvdtrain.strategies.parameter_server.variable_placement import Item, part_sizes, plan
from hvdtrain.tf_config import TfConfig

CONFIG = TfConfig("a:1", ("b:2",), ("c:3", "d:4"), "chief", 0)


def test_large_variables_are_split_and_all_are_balanced() -> None:
    items = [Item(10, 40, False), Item(1000, 4000, True), Item(7, 900, False), Item(3, 30, True)]
    assert plan(items, servers=3, min_part=1000) == [[1], [0, 1, 2], [0], [2]]


def test_parts_are_not_smaller_than_asked_for() -> None:
    (places,) = plan([Item(1000, 2999, True)], servers=4, min_part=1000)
    assert len(places) == 2
    assert plan([Item(2, 10**6, True)], servers=4, min_part=1) == [[0, 1]]


@pytest.mark.parametrize(("rows", "parts", "sizes"), [(10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1])])
def test_sizes_of_parts(rows: int, parts: int, sizes: list[int]) -> None:
    assert part_sizes(rows, parts) == sizes


def split(rows: int = 7, parts: int = 3) -> tuple[SplitVariable, np.ndarray]:
    values = np.arange(rows * 2, dtype="float32").reshape(rows, 2)
    variable: Any = keras.Variable(values)
    pieces = [tf.Variable(p) for p in tf.split(values, part_sizes(rows, parts))]
    split_value(variable, pieces, tf.Variable(0.0))
    return variable, values


def test_a_split_variable_looks_whole() -> None:
    variable, values = split()
    np.testing.assert_array_equal(variable.numpy(), values)
    np.testing.assert_array_equal(
        keras.ops.matmul(variable, np.ones((2, 1))), values @ np.ones((2, 1))
    )
    variable.assign(values * 2)
    np.testing.assert_array_equal(np.concatenate([p.numpy() for p in variable.parts]), values * 2)
    variable.assign_add(values)
    np.testing.assert_array_equal(variable.numpy(), values * 3)
    assert variable.shape == (7, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_split_variable_are_those_of_the_whole(compiled: bool) -> None:
    """Read whole and by rows in one step, as by tied weights; rows that are asked for twice."""
    variable, values = split()
    whole = tf.Variable(values)
    indices = tf.constant([[0, 6], [2, 2], [4, 3]])

    def gradient(read: Any, rows: Any, source: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(indices) ** 2) + tf.reduce_sum(tf.sin(read()))
        with tf.GradientTape() as second:
            sparse = tf.reduce_sum(rows(indices) ** 3)
        return tape.gradient(loss, source), second.gradient(sparse, source)

    def of_parts() -> tuple[Any, Any]:
        return gradient(lambda: variable.value, variable.rows, variable)

    both, sparse = tf.function(of_parts)() if compiled else of_parts()
    expected, expected_sparse = gradient(whole.read_value, lambda i: tf.gather(whole, i), whole)
    np.testing.assert_allclose(
        tf.convert_to_tensor(both), tf.convert_to_tensor(expected), rtol=1e-6
    )
    assert isinstance(sparse, tf.IndexedSlices)
    pieces = variable.pieces(sparse)
    assert all(isinstance(piece, tf.IndexedSlices) for piece in pieces)
    np.testing.assert_allclose(
        tf.concat([tf.convert_to_tensor(p) for p in pieces], 0),
        tf.convert_to_tensor(expected_sparse),
        rtol=1e-6,
    )


def test_what_a_step_assigns_stays_in_the_step() -> None:
    variable = make_step_variable(keras.Variable(5.0))
    assert isinstance(variable, StepVariable)
    with in_step([variable], [tf.constant(1.0)]):
        variable.assign_add(2.0)
        assert float(variable.value) == 3.0
    assert float(variable.value) == 5.0
    variable.assign(7.0)
    assert float(variable.value) == 7.0


class Interrupted(keras.optimizers.SGD):
    """SGD with momentum; another worker adds 10 to the momenta while this one computes them."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slot = self.momentums[self._get_variable_index(variable)]
        found = slot * self.momentum - gradient * learning_rate
        held = tf_variables(slot)[getattr(slot, "chosen", None) or 0]
        held.assign_add(tf.fill(held.shape, 10.0))
        self.assign(slot, found)
        self.assign_add(variable, slot)


@pytest.mark.parametrize("parts", [1, 3])
def test_momenta_keep_what_another_worker_adds(parts: int) -> None:
    variable: Any = keras.Variable(np.zeros((6, 2), "float32"))
    optimizer = Interrupted(0.5, momentum=0.5)
    optimizer.build([variable])
    (slot,) = optimizer.momentums
    for one in (variable, slot):
        if parts > 1:
            pieces = [tf.Variable(p) for p in tf.split(one.value.read_value(), parts)]
            split_value(one, pieces, tf.Variable(0.0))
        else:
            make_step_variable(one)
    update_where_variables_are(optimizer)
    step = tf.function(lambda g: optimizer.apply([g], [variable]), autograph=False)
    step(tf.ones((6, 2)))
    np.testing.assert_array_equal(slot.numpy(), np.full((6, 2), 9.5))
    # The weights get the step that this worker has computed.
    np.testing.assert_array_equal(variable.numpy(), np.full((6, 2), -0.5))


def test_the_chief_names_who_is_missing() -> None:
    asked: list[str] = []

    def answers(address: str) -> bool:
        asked.append(address)
        return address != "d:4"

    with pytest.raises(EngineError, match=r"No answer for 3 s from server 1 at d:4: check that it"):
        wait_for_all(CONFIG, answers, seconds=3, sleep=lambda seconds: None)
    assert asked.count("d:4") == 3
    assert asked.count("c:3") == 1, "who answered is not asked again"


@pytest.mark.parametrize(
    ("silent", "message"),
    [("d:4", r"Parameter server 1 \(d:4\) is lost"), ("b:2", "No worker has answered")],
)
def test_the_watch_ends_a_job_that_cannot_go_on(silent: str, message: str) -> None:
    ended = threading.Event()
    watch = Watch(
        CONFIG,
        answering=lambda address: address != silent,
        end=lambda problem: ended.set(),
        poll_seconds=0.01,
        alone_seconds=0.1,
    )
    assert ended.wait(10)
    with pytest.raises(EngineError, match=message):
        watch.check()


def test_without_a_cluster_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(
        UsageError, match="hvdtrain run --strategy parameter-server --workers N --ps M"
    ):
        ParameterServer().start(0)


class Remote:
    """A result on a worker that may be lost before it is read."""

    def __init__(self, value: tf.Tensor, lost: bool) -> None:
        self._value = value
        self._lost = lost

    def _get_error(self) -> None:
        return None

    def get(self) -> tf.Tensor:
        if self._lost:
            raise tf.errors.UnavailableError(None, None, "from /job:worker/replica:0/task:0")
        return self._value


class Coordinator:
    """Runs what is scheduled, here and at once.

    The results of the closures `lost` are lost; the closures `repeated` run again, as if their worker had died.
    """

    def __init__(self, lost: set[int], repeated: set[int]) -> None:
        self.lost = lost
        self.repeated = repeated
        self.scheduled = 0

    def schedule(self, function: Any, args: Any) -> Remote:
        self.scheduled += 1
        result = function(*args)
        if self.scheduled in self.repeated:
            result = function(*args)
        return Remote(result, self.scheduled in self.lost)


def share(x: np.ndarray, y: np.ndarray) -> Share:
    return Share((tf.constant(x), tf.constant(y)), len(x), len(x), 0, 0)


@pytest.mark.parametrize(
    ("lost", "repeated", "scheduled"), [({2, 3, 6}, set(), 9), (set(), {1, 2}, 8)]
)
def test_a_step_whose_worker_dies_counts_once(
    lost: set[int], repeated: set[int], scheduled: int
) -> None:
    """Its training is done and not repeated: only what it counted is found out again."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    x = np.random.default_rng(0).normal(size=(12, 2)).astype("float32")
    y = x[:, :1] - 1
    symbolic = (keras.KerasTensor((4, 2)), keras.KerasTensor((4, 1)))
    build_model(model, symbolic)
    update_where_variables_are(model.optimizer)
    coordinator = Coordinator(lost, repeated)
    watch = Watch(CONFIG, answering=lambda address: True, end=lambda problem: None)
    steps = AsyncSteps(model, coordinator, watch, CONFIG, limit=2)
    shares = [share(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    start = model.get_weights()
    for one in shares:
        logs = steps.train([one])
    steps.finish()
    assert int(model.optimizer.iterations) == 3
    assert float(model.metrics[0].count) == 12
    assert set(logs) == {"loss", "mae"}
    trained = model.get_weights()
    expected = keras.models.clone_model(model)
    expected.set_weights(start)
    expected.compile("sgd", "mse")
    expected.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(trained, expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    model.reset_metrics()
    outputs = [steps.predict(one) for one in shares]
    np.testing.assert_allclose(
        np.concatenate([one.get() for one in outputs]), expected.predict(x, verbose=0), atol=1e-6
    )
    assert coordinator.scheduled == scheduled


def test_threads_of_tensorflow_print_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A lost server is named in another place; what else ends such a thread takes a line."""
    config = TfConfig("c:3", ("b:2",), ("a:1",), "chief", 0)
    shown: list[Any] = []
    hook = without_tracebacks(shown.append, config)
    for name in ("WorkerClosureProcessingLoop-0", "the user's"):
        for text in ("Connection refused: /job:ps/replica:0/task:0", "no\nanswer"):
            thread = threading.Thread(name=name)
            hook(threading.ExceptHookArgs((ValueError, ValueError(text), None, thread)))
    assert [(one.thread.name, str(one.exc_value)) for one in shown] == [
        ("the user's", "no\nanswer")
    ]
    assert caplog.messages == ["WorkerClosureProcessingLoop-0 has ended: ValueError: no"]


def on_servers(variable: Any, parts: int) -> None:
    if parts > 1:
        split_value(
            variable, [tf.Variable(p) for p in tf.split(variable.value, parts)], tf.Variable(0.0)
        )
    else:
        make_step_variable(variable)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_constraint_takes_nothing_back_of_another_workers_update(parts: int) -> None:
    def bound(w: Any) -> Any:
        result = keras.ops.minimum(w, 0.5)
        for held in tf_variables(variable):
            held.assign_add(tf.ones_like(held))  # Meanwhile, another worker.
        return result

    variable: Any = keras.Variable([[0.7], [0.5], [0.4], [0.0]])
    variable.constraint = bound
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([variable])
    on_servers(variable, parts)
    update_where_variables_are(optimizer)
    tf.function(lambda: optimizer.apply([tf.ones([4, 1])], [variable]))()
    np.testing.assert_allclose(variable.numpy(), [[1.5], [1.4], [1.3], [0.9]], rtol=1e-6)
    assert variable.constraint is bound


def test_an_average_of_weights_is_changed_by_additions() -> None:
    def averages(remote: bool) -> tuple[list[str], np.ndarray]:
        variable: Any = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
        optimizer.build([variable])
        if remote:
            for one in (variable, *optimizer.variables):
                on_servers(one, 1)
            update_where_variables_are(optimizer)

        @tf.function
        def step(number: tf.Tensor) -> None:
            with in_step([make_step_variable(optimizer._iterations)], [number]):
                optimizer.apply([tf.ones([2])], [variable])

        for number in range(2):
            step(tf.constant(number, tf.int64))
        (graph,) = [one.graph for one in step._list_all_concrete_functions()]
        assigned = [op.type for op in graph.get_operations() if op.type == "AssignVariableOp"]
        return assigned, optimizer._model_variables_moving_average[0].numpy()

    assigned, found = averages(remote=True)
    assert not assigned
    plain, expected = averages(remote=False)
    assert plain
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_prediction_keeps_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the first of its steps is waited for."""
    inputs: list[Any] = []

    class Pending:
        def get(self) -> int:
            return sum(one() is not None for one in inputs)

    def outputs() -> Any:
        for _ in range(3):
            x = np.ones((2, 1))
            inputs.append(weakref.ref(x))
            yield Share((x,), 2, 2, 0, 0), Pending()
            del x

    place = "hvdtrain.strategies.parameter_server.asynchronous.gather_predictions"
    monkeypatch.setattr(place, list)
    strategy = ParameterServer()
    strategy._config = CONFIG
    assert [kept for _, kept in strategy.gather(outputs())] == [0, 0, 0]


def test_variables_in_parts_are_told_apart() -> None:
    """Their value is a new tensor for each reader."""
    (first, _), (second, _) = split(), split()
    second.assign(np.full((7, 2), np.nan, "float32"))
    assert unique([first, second, first]) == [first, second]
    assert without([first, second], [first]) == [second]
    assert not_finite([first, second]) == [second.path]
