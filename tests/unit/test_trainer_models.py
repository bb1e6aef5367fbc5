"""Models that plain Keras trains train with the Trainer: one rank, against plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.checkpoint.folder import Checkpoint, save
from hvdtrain.errors import UsageError

BATCH = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
EXACT = 1e-6
"""float32's rounding, of values around 1."""


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> None:
    hvdtrain.init()


class Mean(keras.Model):
    """Its layers are made when it is called."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.eager = eager
        self.first, self.norm, self.last = (
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(1),
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if self.eager:
            x = x * float(np.sign(1 + x.numpy() ** 2).mean())
        return self.last(self.norm(self.first(x), training=training))


class Looking(Mean):
    """Its step looks at numbers, which only eager tensors have."""

    def train_step(self, data: Any) -> dict[str, Any]:
        assert np.isfinite(data[0].numpy()).all()
        return super().train_step(data)


class Stepping(keras.Model):
    """No call; all layers are made in its first step, and it has two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = layers.Dense(4, activation="tanh"), layers.BatchNormalization()
        self.last = layers.Dense(1)
        self.others = [keras.optimizers.Adam(0.01)]
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            hidden = self.norm(self.first(x), training=True)
            loss = tf.reduce_mean((self.last(hidden) - y) ** 2)
        for optimizer, layer in ((self.optimizer, self.first), (self.others[0], self.last)):
            variables = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class InNumPy(keras.metrics.Metric):
    """Counts in Python, for run_eagerly."""

    def __init__(self) -> None:
        super().__init__(name="in_numpy")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(float(np.abs(y_true.numpy() - y_pred.numpy()).sum()))

    def result(self) -> Any:
        return self.total


class Both(keras.metrics.Metric):
    """Its result is a dict."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.low = self.add_weight(name="low", initializer="zeros")
        self.high = self.add_weight(name="high", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        apart = y_true - y_pred
        self.low.assign_add(tf.reduce_sum(tf.minimum(apart, 0)))
        self.high.assign_add(tf.reduce_sum(tf.maximum(apart, 0)))

    def result(self) -> Any:
        return {"low": self.low, "high": self.high}


class Endpoint(layers.Layer):
    def call(self, y: Any, outputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(y - outputs)))
        return outputs


def endpoint() -> keras.Model:
    x, y = keras.Input((3,), name="x"), keras.Input((1,), name="y")
    model = keras.Model({"x": x, "y": y}, Endpoint()(y, layers.Dense(1)(x)))
    model.compile("sgd")
    return model


def compiled(make: Callable[[], keras.Model], **arguments: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = make()
        model.compile("sgd", **{"loss": "mse"} | arguments)
        return model

    return build


EAGERLY: dict[str, Any] = {"run_eagerly": True}
CASES: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "built by its first batch": (compiled(Mean), X, Y),
    "numpy in train_step": (compiled(Looking, **EAGERLY), X, Y),
    "numpy in call": (compiled(lambda: Mean(eager=True), **EAGERLY), X, Y),
    "numpy in a metric": (compiled(Mean, metrics=[InNumPy()], **EAGERLY), X, Y),
    "a metric of numbers in Python": (
        compiled(
            Mean, metrics=[lambda y, p: float(np.abs(y.numpy() - p.numpy()).mean())], **EAGERLY
        ),
        X,
        Y,
    ),
    "a dict of metrics": (compiled(Mean, metrics=[Both()]), X, Y),
    "two optimizers and no call": (compiled(Stepping), X, Y),
    "the same, eagerly": (compiled(Stepping, **EAGERLY), X, Y),
    "loss from add_loss": (endpoint, {"x": X, "y": Y}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_keras(name: str) -> None:
    build, x, y = CASES[name]
    keras.utils.set_random_seed(1)
    model = build()
    wanted = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    trainer = hvdtrain.Trainer(build, global_batch_size=BATCH, seed=1)
    found = trainer.fit(x, y, epochs=2, shuffle=False, verbose=0).history
    assert found.keys() == wanted.keys()
    for values in found:
        assert found[values] == pytest.approx(wanted[values], rel=1e-5), values
    for ours, theirs in zip(trainer.model.weights, model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=EXACT)


class OwnCompile(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compile(self, opt: Any, **kwargs: Any) -> None:
        super().compile(optimizer=opt, loss="mse", **kwargs)


def own_compile() -> keras.Model:
    model = OwnCompile()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def test_a_compile_of_ones_own_and_rates() -> None:
    built = Stepping()
    built.compile(keras.optimizers.SGD(0.1))
    trainer = hvdtrain.Trainer(built, global_batch_size=BATCH, warmup_epochs=1)
    seen = []
    rates = lambda epoch, logs: seen.append(  # noqa: E731
        [float(built.optimizer.learning_rate), float(built.others[0].learning_rate)]
    )
    watch = keras.callbacks.LambdaCallback(on_epoch_end=rates)
    trainer.fit(X, Y, verbose=0, epochs=2, callbacks=watch)
    assert seen == [pytest.approx([0.1, 0.01])] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hvdtrain.Trainer(OwnCompile, global_batch_size=8),
            "overrides compile with its own arguments",
        ),
        (
            lambda: hvdtrain.Trainer(own_compile, "sgd", global_batch_size=8),
            "OwnCompile overrides compile, and was compiled with its own optimizer",
        ),
        (
            lambda: hvdtrain.Trainer(own_compile, loss="mse", global_batch_size=8),
            "OwnCompile overrides compile, and was compiled with its own loss",
        ),
        (
            lambda: hvdtrain.Trainer(compiled(Stepping), global_batch_size=8, shard_optimizer=True),
            "several optimizers",
        ),
        (
            lambda: hvdtrain.Trainer(compiled(TwoSteps), global_batch_size=8),
            "TwoSteps overrides make_train_function, .* override train_step instead",
        ),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


class TwoSteps(keras.Sequential):
    """Takes two steps for each batch."""

    def make_train_function(self, force: bool = False) -> Any:
        super().make_train_function(force)
        one = self.train_function
        self.train_function = lambda batches: [one(batches), one(batches)][1]
        return self.train_function


def remembering(batch: int) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential(
        [layers.Input(batch_shape=(batch, 2, 3)), layers.LSTM(4, stateful=True), layers.Dense(1)]
    )


def test_a_model_of_a_strategys_scope_is_refused() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)]))()
    with pytest.raises(UsageError, match=r"scope of a tf\.distribute strategy.* outside of"):
        hvdtrain.Trainer(model, global_batch_size=8)


def test_a_stateful_rnn_is_told_the_share() -> None:
    x, y = RNG.normal(size=(16, 2, 3)), RNG.normal(size=(16, 1))
    trainer = hvdtrain.Trainer(remembering(4), "sgd", "mse", global_batch_size=8)
    with pytest.raises(UsageError, match=r"batch size of 4 .* global_batch_size=4, .*8 // hvd"):
        trainer.fit(x, y)
    trainer = hvdtrain.Trainer(remembering(8), "sgd", "mse", global_batch_size=8)
    with pytest.raises(UsageError, match="leave 7 out"):
        trainer.fit(x[:15], y[:15])
    trainer.fit(x, y, verbose=0)


def test_a_model_with_two_optimizers_is_saved_and_loaded(tmp_path: Path) -> None:
    first = hvdtrain.Trainer(compiled(Stepping), global_batch_size=BATCH)
    first.fit(X, Y, verbose=0)
    first.model.save_weights(tmp_path / "m.weights.h5")
    second = hvdtrain.Trainer(compiled(Stepping), global_batch_size=BATCH)
    second.fit(X, Y, epochs=2, verbose=0)
    second.model.load_weights(tmp_path / "m.weights.h5")
    for ours, theirs in zip(second.model.weights, first.model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


class Owning(keras.Model):
    """Its optimizer is an attribute: compile has none."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.own = layers.Dense(1), keras.optimizers.SGD(0.1)

    def compile(self) -> None:
        super().compile(optimizer=None)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def owning() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Owning()
    model.compile()
    model.build((None, 3))
    return model


def test_a_model_that_is_compiled_without_an_optimizer(tmp_path: Path) -> None:
    plain = owning()
    plain.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    trainer = hvdtrain.Trainer(owning, global_batch_size=BATCH, run_dir=tmp_path / "a")
    trainer.fit(X, Y, shuffle=False, verbose=0)
    for found, wanted in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT)
    assert (tmp_path / "a" / "model.keras").is_file()
    saving = hvdtrain.Trainer(
        owning,
        global_batch_size=BATCH,
        run_dir=tmp_path / "b",
        checkpoints=hvdtrain.Checkpoints(),
    )
    with pytest.raises(UsageError, match="the optimizer of compile"):
        saving.fit(X, Y, verbose=0)


class Shuffling(keras.utils.PyDataset):
    """Shuffles itself when an epoch ends, and so before the first one as well."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng, self.order = np.random.default_rng(seed), np.arange(16)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.order = self.rng.permutation(16)


@pytest.mark.parametrize("equal", [True, False])
def test_items_that_shuffle_themselves(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not equal:  # Read as a stream.
        monkeypatch.setattr("hvdtrain.data.make.py_dataset_source", lambda *given: None)

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((3,)), layers.Dense(1)])

    plain = make()
    plain.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    trainer = hvdtrain.Trainer(make, keras.optimizers.SGD(0.1), "mse", global_batch_size=BATCH)
    found = []
    for model in (plain, trainer):
        data, validation = Shuffling(1), Shuffling(2)
        arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
        histories = [model.fit(data, validation_data=validation, **arguments) for _ in range(2)]
        numbers = [history.history[name] for history in histories for name in history.history]
        found.append(np.array([*np.ravel(numbers), model.evaluate(validation, verbose=0)]))
    np.testing.assert_allclose(found[1], found[0], rtol=EXACT)


class Penalized(keras.Model):
    """Its only loss is the one that its own call adds, or that of its weights."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.dense = layers.Dense(3, kernel_regularizer=None if adds else "l2")

    def call(self, x: Any) -> Any:
        y = self.dense(x)
        if self.adds:
            self.add_loss(tf.reduce_mean(tf.square(y - x)))
        return y


@pytest.mark.parametrize("adds", [True, False])
def test_a_loss_that_a_model_has_once_it_is_called(adds: bool) -> None:
    losses = []
    for compiled in (True, False):
        keras.utils.set_random_seed(1)
        model = Penalized(adds)
        if compiled:
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
            history = model.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
        else:
            trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.1), global_batch_size=BATCH)
            history = trainer.fit(X, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=EXACT)


def test_compiled_again_with_the_same_optimizer() -> None:
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential([keras.Input((3,)), layers.Dense(1)]),
        "sgd",
        "mse",
        global_batch_size=BATCH,
    )
    trainer.fit(X, Y, verbose=0)
    trainer.model.compile(trainer.model.optimizer, "mae", jit_compile=False)
    with pytest.raises(UsageError, match="The model was compiled again"):
        trainer.fit(X, Y, verbose=0)


def test_a_model_without_a_loss_is_named() -> None:
    trainer = hvdtrain.Trainer(Mean, "sgd", global_batch_size=BATCH)
    with pytest.raises(UsageError, match="The model has no loss: pass Trainer a loss"):
        trainer.fit(X, Y, verbose=0)


def test_checkpoints_of_a_manager_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    save(folder, 1, Checkpoint({"step": 1}, {}, [None]))
    make = compiled(lambda: keras.Sequential([keras.Input((3,)), layers.Dense(1)]))
    trainer = hvdtrain.Trainer(
        make, global_batch_size=8, run_dir=tmp_path / "run", checkpoints=hvdtrain.Checkpoints()
    )
    with pytest.raises(
        UsageError, match="are those of a CheckpointManager: choose another run_dir"
    ):
        trainer.fit(X, Y, verbose=0)
