"""Learning-rate callbacks against NumPy, and the arguments of the other callbacks (one process)."""

from typing import Any

import keras
import numpy as np
import pytest
from thread_ranks import thread_ranks

import hvdtrain.keras as hvd
from hvdtrain import runtime
from hvdtrain.errors import UsageError

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    runtime.start_horovod()


def model_of(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    return model


def fit(model: keras.Model, callback: Any, epochs: int = 4) -> dict[str, Any]:
    history = model.fit(
        X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback]
    )
    return history.history


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def numpy_sgd(rates: list[float], momentum: float, nesterov: bool, corrected: bool) -> np.ndarray:
    """Goyal et al. 2017, equation 10, as Keras writes SGD: the velocity holds the rate."""
    keras.utils.set_random_seed(1)
    weights = model_of("sgd").get_weights()[0].astype("float64")
    velocity, last = np.zeros_like(weights), 0.1
    for step, rate in enumerate(rates):
        rows = slice(4 * (step % STEPS), 4 * (step % STEPS) + 4)
        x, y = X[rows], Y[rows]
        gradient = 2 * x.T @ (x @ weights - y) / 4
        carried = momentum * (rate / last if corrected else 1.0)
        velocity = carried * velocity - rate * gradient
        weights = weights + (momentum * velocity - rate * gradient if nesterov else velocity)
        last = rate
    return weights


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_correction_against_numpy(nesterov: bool, corrected: bool) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
    model = model_of(hvd.DistributedOptimizer(optimizer))
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, 0.5, start_epoch=1, end_epoch=3, momentum_correction=corrected
    )
    fit(model, schedule)
    rates = [rate for rate in (0.1, 0.1, 0.05, 0.05) for _ in range(STEPS)]
    expected = numpy_sgd(rates, 0.9, nesterov, corrected)
    assert np.abs(model.get_weights()[0] - expected).max() < 1e-6
    other = numpy_sgd(rates, 0.9, nesterov, not corrected)
    assert np.abs(model.get_weights()[0] - other).max() > 1e-3


def test_a_schedule_for_each_batch() -> None:
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda e: 1 / (1 + e), staircase=False
    )
    model = model_of(keras.optimizers.Adam(0.5))
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[schedule, rates])
    expected = [0.1 / (1 + epoch + batch / STEPS) for epoch in range(2) for batch in range(STEPS)]
    assert rates.rates == pytest.approx(expected)


def test_the_rate_is_logged_and_stays_outside_of_its_epochs() -> None:
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.1, start_epoch=1, end_epoch=3)
    assert fit(model_of("sgd"), schedule)["lr"] == pytest.approx([0.01, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("size", [1, 4])
def test_warm_up(size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("hvdtrain.keras.learning_rate.ALL_RANKS", thread_ranks(size)[0])
    rates = Rates()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    model = model_of(keras.optimizers.SGD(0.4))
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[warmup, rates])
    steps = np.minimum(np.arange(1, 3 * STEPS + 1), 2 * STEPS)
    assert rates.rates == pytest.approx(list(0.4 / size * (1 + (size - 1) * steps / (2 * STEPS))))
    assert (
        capsys.readouterr().out.count("Epoch 2: finished gradual learning rate warmup to 0.4") == 1
    )


def test_rmsprop_is_corrected_and_an_unknown_optimizer_warns() -> None:
    for optimizer in (keras.optimizers.RMSprop(0.1, momentum=0.9), keras.optimizers.SGD(0.1)):
        fit(model_of(optimizer), hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), epochs=2)

    class Own(keras.optimizers.Adam):
        momentum = 0.9

    with pytest.warns(UserWarning, match="no effect on Own"):
        fit(model_of(Own(0.1)), hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), epochs=2)


def test_rmsprop_velocities_are_scaled() -> None:
    model = model_of(keras.optimizers.RMSprop(0.1, momentum=0.9))
    fit(model, keras.callbacks.Callback(), epochs=1)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    callback.set_model(model)
    before = np.array(model.optimizer._momentums[0])
    callback.on_epoch_begin(2)
    callback.on_train_batch_begin(0)
    assert np.array(model.optimizer._momentums[0]) == pytest.approx(before / 4)


def test_wrong_arguments() -> None:
    schedule = hvd.callbacks.LearningRateScheduleCallback
    with pytest.raises(UsageError, match="initial_lr"):
        schedule(None, 0.5)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    without = keras.Sequential([keras.layers.Dense(1)])
    without.compile(optimizer=None)
    callback = schedule(0.1, 0.5)
    callback.set_model(without)
    with pytest.raises(UsageError, match="of compile, and there is none"):
        callback.on_train_begin()
    with pytest.raises(UsageError, match="this optimizer has a schedule"):
        fit(model_of(keras.optimizers.SGD(decay)), schedule(0.1, 0.5))
    callback = schedule(0.1, 0.5, staircase=False)
    callback.set_model(model_of("sgd"))
    callback.set_params({"steps": None})
    with pytest.raises(UsageError, match="pass steps_per_epoch"):
        callback.on_train_begin()
    with pytest.raises(UsageError, match="is not a variable"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])
    with pytest.raises(UsageError, match="filepath is required"):
        fit(model_of("sgd"), hvd.callbacks.BestModelCheckpoint(monitor="loss"))
    with pytest.raises(UsageError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    with pytest.raises(UsageError, match="synchronized"):
        hvd.SyncBatchNormalization(synchronized=True)
    with pytest.raises(UsageError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_sync_batch_norm_saves_and_loads(tmp_path: Any) -> None:
    model = keras.Sequential(
        [keras.Input((3,)), hvd.SyncBatchNormalization(momentum=0.7, fused=False, name="norm")]
    )
    model.layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is hvd.SyncBatchNormalization
    assert loaded.layers[0].get_config() == model.layers[0].get_config()
    assert "synchronized" not in loaded.layers[0].get_config()
    assert (loaded.predict(X, verbose=0) == model.predict(X, verbose=0)).all()


def test_the_callbacks_do_nothing_wrong_on_one_rank() -> None:
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    plain = model_of(keras.optimizers.SGD(0.1))
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = model.fit(X, Y, shuffle=False, verbose=0, epochs=2, callbacks=callbacks).history
    assert history == plain.fit(X, Y, shuffle=False, verbose=0, epochs=2).history
