"""`hvdtrain run --adopt`: what a fit tells about a result that is not that of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain.adopt.differences import differences_by_rounding, known_differences


def fitted(optimizer: Any, *layers: Any) -> keras.Model:
    """A model after an epoch of few steps."""
    keras.utils.set_random_seed(4)
    x = np.random.normal(size=(32, 6)).astype("float32")
    last = keras.layers.Dense(1, name="last")
    model = keras.Sequential([keras.Input((6,)), *layers, last], name="net")
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :1] ** 2, batch_size=8, verbose=0)
    return model


def in_front_of_batch_norm() -> list[Any]:
    return [keras.layers.Dense(8, name="first"), keras.layers.BatchNormalization()]


@pytest.mark.parametrize(
    "optimizer", ["adam", "rmsprop", "adamw", "nadam", "muon", "adamax", "lion"]
)
def test_a_bias_in_front_of_batch_normalization(optimizer: str) -> None:
    """Its exact gradient is 0: what it adds is subtracted with the mean."""
    told = differences_by_rounding(fitted(optimizer, *in_front_of_batch_norm()))
    assert told.startswith("Rounding moves net/first/bias:"), told


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_optimizers_whose_steps_follow_the_gradient(optimizer: str) -> None:
    assert differences_by_rounding(fitted(optimizer, *in_front_of_batch_norm())) == ""


@pytest.mark.parametrize("layer", [keras.layers.Dense(8), keras.layers.Dense(8, "relu")])
def test_a_bias_that_counts(layer: Any) -> None:
    assert differences_by_rounding(fitted("adam", layer)) == ""


def test_the_gradients_of_a_loss_that_is_scaled() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=16.0)
    assert "first/bias" in differences_by_rounding(fitted(optimizer, *in_front_of_batch_norm()))


def test_what_is_known_before_a_fit() -> None:
    half = fitted("sgd", keras.layers.Dense(8, dtype="mixed_bfloat16"))
    random = fitted("sgd", keras.layers.Dropout(0.5))
    plain = fitted("sgd", keras.layers.Dense(8))
    assert [known_differences(model, has_seed=True) for model in (half, random, plain)] == [
        ". Layers compute in bfloat16, in which sums in another order differ by more than rounding in float32",
        ". Layers that draw random numbers, such as dropout, draw others than on one worker",
        "",
    ]
    assert "sets no seed" in known_differences(plain, has_seed=False)
