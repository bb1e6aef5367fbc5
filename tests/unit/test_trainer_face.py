"""fit, evaluate and predict take and return what those of keras.Model do: one rank, against plain Keras."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
from keras import callbacks as kc

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.trainer.setup import check_epochs

BATCH = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
W = RNG.uniform(0.5, 2, 20).astype("float32")
EXACT = 1e-6
"""float32's rounding, of values around 1."""


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> None:
    hvdtrain.init()


def small() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def two_outputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    return keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(1, name="b")(x)])


def plain(make: Any = small, **compiled: Any) -> keras.Model:
    model = make()
    # Keras weighs each output's loss by the batch's size only where the size is known: eagerly it is.
    model.compile("sgd", **{"loss": "mse", "run_eagerly": make is two_outputs} | compiled)
    return model


def trainer(make: Any = small, **compiled: Any) -> hvdtrain.Trainer:
    return hvdtrain.Trainer(
        make, "sgd", **{"loss": "mse", "global_batch_size": BATCH, "seed": 1} | compiled
    )


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        {"metrics": ["mae"]},
        {"metrics": ["mae", "mse"], "weighted_metrics": ["mae"]},
        {"make": two_outputs, "metrics": [["mae"], ["mse"]]},
    ],
    ids=["loss", "metric", "metrics", "outputs"],
)
def test_evaluate_returns_what_keras_returns(compiled: dict[str, Any]) -> None:
    y = [Y, Y] if "make" in compiled else Y
    keras_model, ours = plain(**compiled), trainer(**compiled)
    wanted = keras_model.evaluate(X, y, batch_size=BATCH, verbose=0)
    found = ours.evaluate(X, y, verbose=0)
    assert type(found) is type(wanted)
    assert found == pytest.approx(wanted, rel=EXACT)
    by_name = keras_model.evaluate(X, y, batch_size=BATCH, verbose=0, return_dict=True)
    assert ours.evaluate(X, y, verbose=0, return_dict=True) == pytest.approx(by_name, rel=EXACT)


class Seen(kc.Callback):
    """What a callback is told while a model is evaluated; it ends that after `last`."""

    def __init__(self, last: int = 99) -> None:
        super().__init__()
        self.last = last
        self.events: list[Any] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.events.append("begin")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append((batch, round(float(logs["loss"]), 5)))
        self.model.stop_evaluating = batch == self.last

    def on_test_end(self, logs: Any = None) -> None:
        self.events.append(("end", round(float(logs["loss"]), 5)))


@pytest.mark.parametrize("last", [99, 1])
def test_callbacks_of_evaluate(last: int) -> None:
    wanted, found = Seen(last), Seen(last)
    loss = plain().evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[wanted])
    assert trainer().evaluate(X, Y, verbose=0, callbacks=found) == pytest.approx(loss, rel=EXACT)
    assert found.events == wanted.events


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_test_begin"])
def test_a_pass_that_is_stopped_before_it_begins_has_one_step(event: str) -> None:
    def fit(fitted: Any, model: keras.Model, **options: Any) -> Any:
        class Stopping(kc.Callback):
            pass

        def stop(*_: Any, logs: Any = None) -> None:
            model.stop_evaluating = event == "on_test_begin"
            model.stop_training = not model.stop_evaluating

        setattr(Stopping, event, stop)
        options |= {"epochs": 2, "validation_data": (X, Y), "callbacks": [Stopping()]}
        return fitted.fit(X, Y, shuffle=False, verbose=0, **options).history, model.get_weights()

    keras_model, ours = plain(), trainer()
    wanted, weights = fit(keras_model, keras_model, batch_size=BATCH)
    found, ours_weights = fit(ours, ours.model)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=EXACT)
    for one, other in zip(ours_weights, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=EXACT)


def test_a_model_with_frozen_layers_is_evaluated() -> None:
    ours = trainer()
    loss = ours.evaluate(X, Y, verbose=0)
    ours.model.layers[0].trainable = False
    assert ours.evaluate(X, Y, verbose=0) == loss
    with pytest.raises(UsageError, match="frozen"):
        ours.fit(X, Y, verbose=0)


def test_what_evaluate_and_predict_show(capsys: pytest.CaptureFixture[str]) -> None:
    ours = trainer()
    ours.evaluate(X, Y, verbose=0)
    ours.predict(X, verbose=0)
    assert capsys.readouterr().out == ""
    ours.evaluate(X, Y, verbose=2)
    ours.predict(X, verbose=2)
    evaluation, prediction = capsys.readouterr().out.splitlines()
    assert evaluation.startswith("Evaluation")
    assert "loss: " in evaluation
    assert prediction.startswith("Prediction")
    ours.evaluate(X, Y, verbose=1)
    assert capsys.readouterr().out.startswith("Evaluation"), "without a terminal there is no view"


def test_integers_of_numpy() -> None:
    check_epochs(np.int64(2), np.int32(0), np.int64(1))  # type: ignore[arg-type]
    check_epochs(2, 0, list(np.arange(1, 3)))


@pytest.mark.parametrize("frequency", [2, [1, 3], (2,)])
def test_validation_freq(frequency: Any) -> None:
    given = {"epochs": 3, "shuffle": False, "validation_data": (X[:5], Y[:5]), "verbose": 0}
    keras_freq = list(frequency) if isinstance(frequency, tuple) else frequency
    wanted = plain().fit(X, Y, batch_size=BATCH, validation_freq=keras_freq, **given).history
    found = trainer().fit(X, Y, validation_freq=frequency, **given).history
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=EXACT)


def test_weights_of_some_outputs() -> None:
    compiled = {"weighted_metrics": [["mae"], ["mae"]]}
    y, weights = [Y, Y], [W, None]
    keras_model, ours = plain(two_outputs, **compiled), trainer(two_outputs, **compiled)
    given: dict[str, Any] = {"sample_weight": weights, "verbose": 0}
    wanted = keras_model.fit(X, y, batch_size=BATCH, shuffle=False, **given).history
    found = ours.fit(X, y, shuffle=False, **given, validation_data=(X, y, weights)).history
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=EXACT)
    evaluated = keras_model.evaluate(X, y, batch_size=BATCH, **given)
    assert ours.evaluate(X, y, **given) == pytest.approx(evaluated, rel=EXACT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.fit(X, Y, batch_size=4), r"batch_size=4: .*global_batch_size=4"),
        (lambda t: t.fit(X, Y, validation_batch_size=4), "validation_batch_size=4: .*global_batch"),
        (lambda t: t.evaluate(X, Y, batch_size=4), "global_batch_size=4"),
        (lambda t: t.predict(X, batch_size=4), "global_batch_size=4"),
        (lambda t: t.fit(X, Y, validation_freq=0), "validation_freq=0: pass an integer, 1"),
        (lambda t: t.fit(X, Y, epochs=2.0), "epochs=2.0: pass an integer, 0 or more"),
        (lambda t: t.fit(X, Y, initial_epoch="1"), "initial_epoch='1': pass an integer"),
        (lambda t: t.fit(X, Y, verbose="loud"), "verbose='loud': choose 'auto', 0, 1 or 2"),
        (lambda t: t.fit(X, Y, callbacks=[kc.History]), r"pass an object, History\(\.\.\.\), not"),
        (lambda t: t.evaluate(X, Y, callbacks=print), "expected a keras.callbacks.Callback, not"),
        (lambda t: t.fit(X, Y, validation_split="0.1"), "validation_split is '0.1'"),
        (lambda t: t.fit(X, Y, validation_split=0.5, sharded=True), "pass validation_data, the"),
        (lambda t: t.fit(X), "has no labels"),
        (lambda t: t.evaluate(X), "has no labels"),
        (lambda t: t.fit(X, Y, validation_data=X), "has no labels"),
        (lambda t: trainer(warmup_epochs=-1).fit(X, Y), "warmup_epochs=-1: pass a number"),
        (lambda t: t.fit(X, Y, validation_freq="all"), "validation_freq='all': .*[1, 3]"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(trainer())


def users_loss(y: Any, outputs: Any) -> Any:
    return y - outputs[:, :, :, None]


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_traceback_shows_the_users_lines(method: str) -> None:
    def shown() -> list[str]:
        with pytest.raises(ValueError, match="out of range") as caught:
            getattr(trainer(loss=users_loss), method)(X, Y)
        return "".join(traceback.format_exception(caught.value)).splitlines()

    lines = shown()
    assert all(__file__ in line for line in lines if line.startswith("  File"))
    assert any("y - outputs[:, :, :, None]" in line for line in lines)
    assert len(lines) <= 9, "\n".join(lines)
    keras.config.disable_traceback_filtering()
    try:
        assert any("hvdtrain/trainer" in line for line in shown())
    finally:
        keras.config.enable_traceback_filtering()
