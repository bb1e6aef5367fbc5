"""Weights that become nan are the same on all ranks: training goes on, as in plain Keras; the guard says so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.checkpoint.folder import NotFinite, require_finite
from hvdtrain.collectives.finite import FiniteWatch, is_finite

X = np.ones((8, 2), np.float32)
BATCH = 4


def targets(broken: int | None) -> np.ndarray:
    y = np.ones((len(X), 1), np.float32)
    if broken is not None:
        y[broken] = np.nan
    return y


def model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="out")])


def by_trainer(y: np.ndarray) -> keras.callbacks.History:
    trainer = hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=BATCH)
    return trainer.fit((X, y), epochs=3, shuffle=False, verbose=0)


def by_callback(y: np.ndarray) -> keras.callbacks.History:
    hvd.init()
    trained = model()
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    guard = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return trained.fit(
        X, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[guard]
    )


@pytest.mark.parametrize("train", [by_trainer, by_callback])
@pytest.mark.parametrize(
    "broken, when", [(0, "after the first step"), (BATCH, "after epoch 1"), (None, None)]
)
def test_nan_weights_are_named_once(
    train: Callable[[np.ndarray], keras.callbacks.History], broken: int | None, when: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = train(targets(broken))
    said = [str(w.message) for w in caught if "nan or inf" in str(w.message)]
    assert len(history.epoch) == 3  # Plain Keras trains on, too.
    if when is None:
        assert not said
    else:
        assert len(said) == 1
        assert said[0].startswith("'sequential") and "out/kernel' has become" in said[0]
        assert when in said[0] and "(and 1 more)" in said[0]


@pytest.mark.parametrize("value, warned", [(1e38, False), (np.inf, True), (np.nan, True)])
def test_what_is_not_finite(value: float, warned: bool) -> None:
    large = tf.Variable([3e38, value], name="large")  # Their sum is inf; they are not.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FiniteWatch().look([tf.Variable([1]), large], "now")
    assert bool(caught) == warned


def test_what_is_not_trained_may_hold_inf_in_a_checkpoint() -> None:
    arrays = [("mask", np.array([0.0, -np.inf], np.float32)), ("kernel", np.ones(2, np.float32))]
    require_finite(arrays, {"mask"})
    with pytest.raises(NotFinite, match="'mask' contains nan or inf"):
        require_finite(arrays)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "complex64", "int32"])
def test_numbers_whose_sum_is_none(dtype: str) -> None:
    kind = tf.as_dtype(dtype).as_numpy_dtype
    large = np.full(1000, 60000, kind)
    assert is_finite(large) and is_finite(-large)
    if dtype != "int32":
        for value in (np.nan, np.inf, -np.inf):
            large[500] = value
            assert not is_finite(large)
            assert is_finite(large, or_inf=True) == np.isinf(value)
