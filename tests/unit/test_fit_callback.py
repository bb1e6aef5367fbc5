"""CheckpointCallback in one process. Bit-identical on several: tests/ranks/test_fit_checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import CheckpointCallback, Trainer, UsageError
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
    [({"keep": 1}, "keep=1: keep at least 2"), ({"every_epochs": 0}, "every_epochs=0: save at")],
)
def test_numbers_that_are_too_small(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointCallback(tmp_path, **options)


def test_it_goes_on_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(CheckpointCallback(tmp_path, every_epochs=2), epochs=3) == [0, 1, 2]
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["2", "3"], "and the last"
    assert fit(CheckpointCallback(tmp_path), epochs=5) == [0, 1, 2, 3, 4]
    assert f"{tmp_path}: resuming after epoch 3 of 5" in capsys.readouterr().out
    assert fit(CheckpointCallback(tmp_path), epochs=5) == [0, 1, 2, 3, 4]
    told = "this run has finished after 5 of 5 epochs: nothing to train"
    assert f"{tmp_path}: {told}" in capsys.readouterr().out


def test_one_fit_a_callback_and_one_model_a_folder(tmp_path: Path) -> None:
    callback = CheckpointCallback(tmp_path)
    fit(callback)
    with pytest.raises(UsageError, match="belongs to a fit that has ended: make a new one"):
        fit(callback)
    with pytest.raises(
        UsageError, match=r"kernel.*is of shape \[4, 5\], and was of shape \[4, 3\]"
    ):
        fit(CheckpointCallback(tmp_path), units=5)
    assert fit(CheckpointCallback(tmp_path), epochs=3) == [0, 1, 2], "the refusal keeps no lock"


def test_weights_that_are_nan_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    fit(CheckpointCallback(tmp_path))
    with pytest.warns(UserWarning, match="No checkpoint after step 3: .*kernel.* holds nan or inf"):
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


def test_a_trainer_has_its_own(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", "mse", global_batch_size=4)
    with pytest.raises(UsageError, match=r"checkpoints=hvdtrain\.Checkpoints"):
        trainer.fit(X, X[:, :1], callbacks=[CheckpointCallback(tmp_path)])
