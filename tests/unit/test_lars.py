"""LARS, against its formula in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError

RATE, MOMENTUM, DECAY, TRUST = 2.0, 0.9, 0.05, 0.1


def expected(
    weights: list[np.ndarray], steps: list[list[np.ndarray]], momentum: float, decay: float
) -> list[np.ndarray]:
    """The weights after steps with these gradients, in float64."""
    weights = [w.astype(np.float64) for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    for gradients in steps:
        for place, g in enumerate(gradients):
            w, rate = weights[place], RATE
            if w.ndim > 1:
                norms = np.linalg.norm(w), np.linalg.norm(g)
                if all(norms):
                    rate *= TRUST * norms[0] / (norms[1] + decay * norms[0])
                g = g + decay * w
            velocities[place] = momentum * velocities[place] - rate * g
            weights[place] = w + velocities[place]
    return weights


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_each_step_is_that_of_the_formula(momentum: float, decay: float) -> None:
    random = np.random.default_rng(0)
    # A matrix, a kernel of a convolution, a bias, and a matrix of zeros.
    shapes = [(3, 4), (2, 2, 3, 5), (4,), (2, 2)]
    first = [random.normal(size=shape).astype(np.float32) for shape in shapes[:-1]]
    first.append(np.zeros(shapes[-1], np.float32))
    steps = [[random.normal(size=s).astype(np.float32) for s in shapes] for _ in range(5)]
    steps[2][0][:] = 0  # A gradient of zeros.
    variables = [keras.Variable(value) for value in first]
    optimizer = hvd.LARS(RATE, momentum, decay, TRUST)
    step = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    optimizer.build(variables)
    for gradients in steps:
        step([tf.constant(g) for g in gradients])
    for variable, wanted in zip(variables, expected(first, steps, momentum, decay), strict=True):
        # Sums of at most 60 squares and five steps, in float32.
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=2e-5, atol=2e-6)


def test_rows_of_an_embedding() -> None:
    """A gradient of some rows is that of the whole variable."""
    dense, rows = (keras.Variable(np.ones((5, 2), np.float32)) for _ in range(2))
    slices = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]), tf.constant([5, 2]))
    for variable, gradient in ((dense, tf.convert_to_tensor(slices)), (rows, slices)):
        hvd.LARS(RATE, weight_decay=DECAY).apply([gradient], [variable])
    np.testing.assert_array_equal(dense.numpy(), rows.numpy())


def test_excluded_from_decay() -> None:
    variables = [keras.Variable(np.ones((2, 2), np.float32), name=name) for name in ("in", "out")]
    optimizer = hvd.LARS(RATE, 0.0, DECAY, TRUST)
    optimizer.exclude_from_weight_decay(var_names=["out"])
    gradient = np.eye(2, dtype=np.float32)
    optimizer.apply([gradient, gradient], variables)
    for variable, decay in zip(variables, (DECAY, 0.0), strict=True):
        (wanted,) = expected([np.ones((2, 2))], [[gradient]], 0.0, decay)
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6)


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def test_a_file_goes_on_as_if_never_saved(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)

    def fit(trained: Any) -> None:
        trained.fit(x, y[:, :1], batch_size=4, shuffle=False, verbose=0)

    whole = model()
    whole.compile(hvd.LARS(RATE, weight_decay=DECAY, trust_coefficient=TRUST, clipnorm=1.0), "mse")
    fit(whole)
    whole.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == whole.optimizer.get_config()
    for one in (whole, loaded):
        fit(one)
    for a, b in zip(whole.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"momentum": 1.0}, "LARS: momentum must be at least 0 and less than 1, not 1.0"),
        ({"momentum": float("nan")}, "LARS: momentum must be"),
        ({"weight_decay": -0.1}, "LARS: weight_decay must be at least 0, not -0.1"),
        ({"trust_coefficient": 0.0}, "LARS: trust_coefficient must be positive, not 0.0"),
    ],
)
def test_out_of_range(options: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hvd.LARS(**options)


def test_split_variables_are_refused() -> None:
    with pytest.raises(UsageError, match="LARS cannot be sharded: it scales each step by the norm"):
        hvdtrain.Trainer(model, hvd.LARS(), "mse", global_batch_size=4, shard_optimizer=True)
