"""A probe compares gradients in full float32, whatever the precision of training, and aside of kinks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.collectives.step_context import Step
from hvdtrain.strategies.probe import probe


class Watched(keras.Model):
    """Notes in which precision its steps multiply, and fails in one of them if asked to."""

    seen: list[bool]
    fails = False

    def train_step(self, data: Any) -> Any:
        self.seen.append(tf.config.experimental.tensor_float_32_execution_enabled())
        if self.fails:
            raise ValueError("a step that fails")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("chosen", [True, False])
def test_tensor_float_32_is_off_meanwhile(chosen: bool, fails: bool) -> None:
    inputs = keras.Input((3,))
    model = Watched(inputs, keras.layers.Dense(1)(inputs))
    model.seen, model.fails = [], fails
    model.compile("sgd", "mse", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    data = (tf.ones((5, 3)), tf.ones((5, 1)))
    step = Step(tf.Variable(1.0), lambda divisor: divisor, share_in_loss=False)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(chosen)
    try:
        verdict = probe(model, data, step)
        assert tf.config.experimental.tensor_float_32_execution_enabled() is chosen
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    assert model.seen and not any(model.seen)
    assert verdict.as_mean is (None if fails else True)


class Kink(keras.layers.Layer):
    """A ReLU of values whose last bits depend on the number of examples, as on a GPU."""

    def call(self, x: Any) -> Any:
        rounding = keras.ops.where(keras.ops.shape(x)[0] > 3, 1e-6, -1e-6)
        return keras.ops.where(x + rounding > 0, x, 0.0)


def test_a_value_near_a_kink_is_no_reason_to_refuse() -> None:
    keras.utils.set_random_seed(0)
    x, y = (np.random.default_rng(0).normal(size=(5, n)).astype("float32") for n in (4, 2))
    first = keras.layers.Dense(64)
    inputs = keras.Input((4,))
    model = Watched(inputs, keras.layers.Dense(2)(Kink()(first(inputs))))
    model.seen = []
    model.compile("sgd", "mse", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    # Three values of one example are 0, up to rounding.
    first.bias.assign(-(x[4] @ np.asarray(first.kernel)) * (np.arange(64) < 3))
    step = Step(tf.Variable(1.0), lambda divisor: divisor, share_in_loss=False)
    found = probe(model, (tf.constant(x), tf.constant(y)), step)
    assert found.as_mean, found
