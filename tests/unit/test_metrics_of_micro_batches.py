"""Metrics of the user's own over the micro-batches of one worker, against plain Keras with whole batches. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
from keras import layers, ops

import hvdtrain

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")


class Counted(keras.metrics.Metric):
    """A number that each update changes by `function`."""

    def __init__(self, name: str, dtype: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value", dtype=dtype)
        self.function = function

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.cast(self.function(self.value, y_pred), self.value.dtype))

    def result(self) -> Any:
        return self.value + 0


def counted() -> list[Any]:
    return [
        Counted("steps", "int32", lambda value, _: value + 1),
        Counted("down", "int64", lambda value, _: value - 2),
        Counted("float_steps", "float32", lambda value, _: value + 1),
        Counted("examples", "int32", lambda value, p: value + ops.shape(p)[0]),
        Counted("largest", "int32", lambda value, p: ops.maximum(value, ops.max(p * 100) // 1)),
        Counted("larger", "float32", lambda value, p: ops.maximum(value, ops.max(p))),
    ]


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.Input((3,)), layers.Dense(1)])


def test_numbers_of_steps_and_extremes() -> None:
    hvdtrain.init()
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    plain = model()
    plain.compile("sgd", "mse", metrics=counted(), jit_compile=False)
    wanted = plain.fit(
        X, X[:, :1], batch_size=8, validation_data=(X[:9], X[:9, :1]), **options
    ).history
    trainer = hvdtrain.Trainer(
        model,
        "sgd",
        "mse",
        metrics=counted(),
        global_batch_size=8,
        layout=hvdtrain.Layout(hvdtrain.Mesh(), micro_batches=3),
    )
    found = trainer.fit(X, X[:, :1], validation_data=(X[:9], X[:9, :1]), **options).history
    assert wanted["steps"] == [3, 3] and wanted["val_steps"] == [2, 2]
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
