"""CheckpointCallback in one process. Bit-identical on several: tests/ranks/test_fit_checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import CheckpointCallback, CheckpointManager, Trainer, UsageError
from hvdtrain.checkpoint import fit_callback
from hvdtrain.runtime import start_horovod

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    start_horovod()


def fit(callback: Any, epochs: int = 2, units: int = 3, factor: float = 1.0) -> list[int]:
    """Returns the epochs in the History that fit returns."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(X * factor, X[:, :1], epochs=epochs, callbacks=callback, verbose=0).epoch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 1}, "keep=1: pass an integer, 2 or more"),
        ({"every_epochs": 1.5}, "every_epochs=1.5: pass an integer, 1 or more"),
    ],
)
def test_numbers_that_are_too_small(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointCallback(tmp_path, **options)


def test_it_goes_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit(CheckpointCallback(tmp_path, every_epochs=2), epochs=3) == [0, 1, 2]
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["2", "3"], "and the last"
    assert fit(CheckpointCallback(tmp_path), epochs=5) == [0, 1, 2, 3, 4]
    assert f"folder '{tmp_path}': resuming in epoch 4 of 5" in caplog.text
    with pytest.raises(
        UsageError, match="an earlier fit in this process already completed all its epochs"
    ):
        fit(CheckpointCallback(tmp_path), epochs=5)
    monkeypatch.setattr(fit_callback, "this_process", lambda: "another one")
    assert fit(CheckpointCallback(tmp_path), epochs=5) == [0, 1, 2, 3, 4]
    told = "nothing to train: 5 epochs are complete, epochs=5"
    assert f"folder '{tmp_path}': {told}" in caplog.text


def test_one_fit_a_callback_and_one_model_a_folder(tmp_path: Path) -> None:
    callback = CheckpointCallback(tmp_path)
    fit(callback)
    with pytest.raises(
        UsageError, match="was already used by a fit that has finished: create a new one"
    ):
        fit(callback)
    with pytest.raises(
        UsageError, match=r"kernel.*has shape \[4, 5\] here, \[4, 3\] in the checkpoint"
    ):
        fit(CheckpointCallback(tmp_path), units=5)
    assert fit(CheckpointCallback(tmp_path), epochs=3) == [0, 1, 2], "the refusal keeps no lock"


def test_weights_that_are_nan_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    fit(CheckpointCallback(tmp_path))
    with pytest.warns(
        UserWarning, match="No checkpoint was written after step 3: .*kernel.* contains nan or inf"
    ):
        fit(CheckpointCallback(tmp_path), epochs=3, factor=np.nan)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "2"]


class Late(keras.Model):
    """Built by its first batch, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x["a"]) + self.dense(x["b"])


def late_fit(folder: Path, epochs: int) -> list[Any]:
    keras.utils.set_random_seed(5)
    model = Late()
    model.compile("adam", "mse")
    data, callbacks = {"a": X, "b": X[::-1]}, CheckpointCallback(folder)
    model.fit(data, X[:, :1], epochs=epochs, callbacks=callbacks, shuffle=False, verbose=0)
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def test_a_model_that_its_first_batch_builds(tmp_path: Path) -> None:
    undisturbed = late_fit(tmp_path / "a", epochs=3)
    late_fit(tmp_path / "b", epochs=2)
    for one, same in zip(undisturbed, late_fit(tmp_path / "b", epochs=3), strict=True):
        np.testing.assert_array_equal(one, same)


class Gan(keras.Model):
    """Two optimizers beside the one that it was compiled with, each built when it first applies; a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.g = keras.layers.Dense(3), keras.layers.Dense(1)
        self.d_optimizer = keras.optimizers.Adam(0.1)
        self.g_optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.count = tf.Variable(0.0)

    def call(self, x: Any) -> Any:
        return self.g(self.d(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.count.assign_add(1.0)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2) * (1.0 + 0.1 * self.count)
        for optimizer, layer in ((self.d_optimizer, self.d), (self.g_optimizer, self.g)):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def gan_fit(folder: Path, epochs: int) -> list[Any]:
    keras.utils.set_random_seed(5)
    model = Gan()
    model.compile()
    callbacks = CheckpointCallback(folder)
    history = model.fit(X, X[:, :1], epochs=epochs, callbacks=callbacks, shuffle=False, verbose=0)
    variables = [*model.variables, *model.d_optimizer.variables, *model.g_optimizer.variables]
    return [history.history["loss"], *(variable.numpy() for variable in variables)]


def test_optimizers_and_variables_of_the_models_own(tmp_path: Path) -> None:
    undisturbed = gan_fit(tmp_path / "a", epochs=4)
    gan_fit(tmp_path / "b", epochs=2)
    for one, same in zip(undisturbed, gan_fit(tmp_path / "b", epochs=4), strict=True):
        np.testing.assert_array_equal(one, same)


class End(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


def test_a_resumed_fit_that_was_interrupted_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], epochs=1, callbacks=CheckpointCallback(tmp_path), verbose=0)
    with pytest.raises(KeyboardInterrupt):
        own = [End(), CheckpointCallback(tmp_path)]
        model.fit(X, X[:, :1], epochs=4, callbacks=own, verbose=0)
    assert model.fit(X, X[:, :1], epochs=2, verbose=0).epoch == [0, 1]


def test_a_log_of_another_training_stays(tmp_path: Path) -> None:
    """One that was there before the first checkpoint, to which the user appends."""
    log = tmp_path / "log.csv"
    fit(keras.callbacks.CSVLogger(log), epochs=3)
    for epochs in (2, 3):
        fit(
            [CheckpointCallback(tmp_path / "run"), keras.callbacks.CSVLogger(log, append=True)],
            epochs,
        )
    assert [row.partition(",")[0] for row in log.read_text().split()] == ["epoch", *"012012"]


def test_a_managers_folder_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keras.Variable(1.0))
    manager.save(1)
    manager.close()
    with pytest.raises(UsageError, match="has checkpoints of another run"):
        fit(CheckpointCallback(tmp_path))


def test_a_trainer_has_its_own(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", "mse", global_batch_size=4)
    with pytest.raises(UsageError, match=r"checkpoints=hvdtrain\.Checkpoints"):
        trainer.fit(X, X[:, :1], callbacks=[CheckpointCallback(tmp_path)])
