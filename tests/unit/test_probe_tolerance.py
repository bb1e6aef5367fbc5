"""A probe compares gradients in full float32, whatever the precision of training."""

from __future__ import annotations

from typing import Any

import keras
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
