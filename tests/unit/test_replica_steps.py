"""Steps of a single replica, against plain Keras."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.building import build_model
from hvdtrain.keras_internals.replica_scope import ReplicaScope, made_again, pure_steps
from hvdtrain.strategies.replica_steps import ReplicaSteps, variables_on_replicas

SOURCE = Path(__file__).parents[1] / "ranks" / "cases" / "own_models.py"
SPEC = importlib.util.spec_from_file_location("own_models", SOURCE)
assert SPEC is not None and SPEC.loader is not None
own = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(own)

ROWS, REAL = 5, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(REAL, 4)).astype("float32")
Y = RNG.normal(size=(REAL, 2)).astype("float32")


def strategy_of(kind: str) -> tf.distribute.Strategy:
    if kind == "central":
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(["CPU:0"], tf.distribute.ReductionToOneDevice())


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


class Own(keras.Sequential):
    """A train_step in the words of Keras's guide, or one that trains nothing."""

    trains = True

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.trains:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Idle(Own):
    trains = False


def make(
    optimizer: Any, metrics: tuple[Any, ...] = (), kind: type = keras.Sequential
) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = kind([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)])
    model.compile(optimizer, "mse", metrics=["mae", *metrics], jit_compile=False)
    return model


def steps_of(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    metrics: tuple[Any, ...] = (),
    kind: type = keras.Sequential,
    rows: int = ROWS,
) -> tuple[keras.Model, ReplicaSteps]:
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    scope = variables_on_replicas(strategy) if mirrored else tf.device("CPU:0")
    with scope:
        model = make(optimizer(), metrics, kind)
        build_model(model, (keras.KerasTensor((rows, 4)), keras.KerasTensor((rows, 2))))
    return model, ReplicaSteps(
        model, strategy, rows, parameter_device=None if mirrored else "CPU:0"
    )


def share(real: int = REAL) -> Share:
    return Share((tf.constant(X[:real]), tf.constant(Y[:real])), real, real, 0, 0)


@pytest.mark.parametrize(
    ("kind", "precision"), [("central", "float32"), ("mirrored", "mixed_float16")]
)
def test_a_step_of_one_replica_is_that_of_keras(kind: str, precision: str) -> None:
    keras.config.set_dtype_policy(precision)
    strategy = strategy_of(kind)
    optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    model, steps = steps_of(strategy, optimizer)
    plain = make(optimizer())
    for _ in range(2):
        model.reset_metrics()
        plain.reset_metrics()
        logs = steps.train([share()])
        wanted = plain.train_on_batch(X, Y, return_dict=True)
    assert {k: float(v) for k, v in logs.items()} == pytest.approx(wanted, rel=1e-3)
    found, expected = model.get_weights(), plain.get_weights()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 if precision == "float32" else 1e-3)
    outputs = steps.predict(share()).numpy()
    assert outputs.shape == (REAL, 2)
    np.testing.assert_allclose(outputs, plain.predict(X, verbose=0), rtol=1e-2, atol=1e-3)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [keras.Sequential, Own])
def test_a_step_in_its_scope_changes_nothing(kind: type) -> None:
    model, _ = steps_of(strategy_of("central"), keras.optimizers.Adam, kind=kind)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [v.numpy() for v in variables]
    with pure_steps(model), ReplicaScope([], 1) as scope:
        model.train_step((tf.constant(X), tf.constant(Y)))
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert len(scope.handed_out) == len(model.trainable_variables)
    if kind is not Own:
        assert any(scope.update_of(v) is not None for v in model.metrics_variables)
    for method in (model.optimizer.apply_gradients, model.optimizer.apply):
        assert method.__self__ is model.optimizer  # Given back.


class Nested(Own):
    """The result of Keras's compiled metrics is a dict."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"compile_metrics": super().train_step(data)}


def test_logs_in_a_dict_of_their_own() -> None:
    _, steps = steps_of(strategy_of("central"), keras.optimizers.SGD, kind=Nested)
    assert list(steps.train([share()])) == ["loss"]


@pytest.mark.parametrize("kind", ["central", "mirrored"])
def test_a_step_that_applies_nothing_is_refused(kind: str) -> None:
    _, steps = steps_of(strategy_of(kind), keras.optimizers.SGD, kind=Idle, rows=REAL)
    with pytest.raises(UsageError, match="train_step of Idle passed"):
        steps.train([share()])


@pytest.mark.parametrize("kind", own.ALL, ids=lambda kind: kind.__name__)
def test_what_a_step_does_after_its_update(kind: type) -> None:
    """The update is made when the step is over: nothing may depend on it, or the step is refused."""
    plain, model = (own.compiled_model(kind, own.decaying(), jit_compile=False) for _ in range(2))
    build_model(model, (keras.KerasTensor((REAL, 3)), keras.KerasTensor((REAL, 1))))
    steps = ReplicaSteps(model, strategy_of("central"), REAL, parameter_device="CPU:0")
    data = Share((tf.constant(X[:, :3]), tf.constant(Y[:, :1])), REAL, REAL, 0, 0)
    if kind in own.AFTER_UPDATE:
        with pytest.raises(UsageError, match=r"applies gradients twice|after it has applied"):
            steps.train([data])
        return
    for _ in range(2):
        steps.train([data])
        plain.fit(X[:, :3], Y[:, :1], batch_size=REAL, shuffle=False, verbose=0)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


class Two(keras.Sequential):
    """A second optimizer, of which the strategy does not know."""

    second = keras.optimizers.Adam()

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        kernel, bias = self.trainable_variables
        of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
        self.optimizer.apply([of_kernel], [kernel])
        self.second.apply([of_bias], [bias])
        return {"loss": loss}


def test_a_second_optimizer_is_refused() -> None:
    keras.utils.set_random_seed(1)
    model = Two([layers.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    build_model(model, (keras.KerasTensor((REAL, 4)), keras.KerasTensor((REAL, 2))))
    model.second.build(model.trainable_variables[1:])
    steps = ReplicaSteps(model, strategy_of("central"), REAL, parameter_device="CPU:0")
    with pytest.raises(UsageError, match="belongs neither to the model"):
        steps.train([share()])


def test_an_optimizer_with_a_weight_decay_of_its_own() -> None:
    muon = lambda: keras.optimizers.Muon(0.1, weight_decay=0.1, adam_weight_decay=0.5)  # noqa: E731
    model, steps = steps_of(strategy_of("mirrored"), muon)
    plain = make(muon())
    for _ in range(2):
        steps.train([share()])
        plain.train_on_batch(X, Y)
    for found, wanted in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_an_optimizer_made_again_decays_the_same_weights() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.5))
    scaled.inner_optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    inner = made_again(scaled).inner_optimizer
    inner.build([])
    named = {name: keras.Variable([1.0], name=name) for name in ("bias", "gamma", "kernel")}
    assert [n for n, v in named.items() if inner._use_weight_decay(v)] == ["kernel"]
    listed = keras.optimizers.AdamW(0.5)
    listed.exclude_from_weight_decay(var_list=[named["bias"]])
    with pytest.raises(UsageError, match="pass names"):
        made_again(listed)


def test_a_loss_that_leaves_entries_out_by_itself() -> None:
    model, plain = make(keras.optimizers.SGD(0.1)), make(keras.optimizers.SGD(0.1))
    for one in (model, plain):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        one.compile(one.optimizer, loss, jit_compile=False)
    labels = np.array([[1], [-1], [0]])
    build_model(model, (keras.KerasTensor((ROWS, 4)), keras.KerasTensor((ROWS, 1))))
    steps = ReplicaSteps(model, strategy_of("central"), ROWS, parameter_device="CPU:0")
    logs = steps.train([Share((tf.constant(X), tf.constant(labels)), REAL, REAL, 0, 0)])
    wanted = plain.train_on_batch(X, labels, return_dict=True)["loss"]
    assert float(logs["loss"]) == pytest.approx(wanted, rel=1e-6)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
