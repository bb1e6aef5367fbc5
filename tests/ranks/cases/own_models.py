"""Models whose train_step does more than one update at its end, and what they are compiled with. No ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers


class Own(keras.Model):
    """Applies once; what the others do is in their `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        return self.step(*data)

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": self.update(x, y)}

    def loss_of(self, x: Any, y: Any) -> Any:
        return self.compute_loss(y=y, y_pred=self(x, training=True))

    def update(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        self.optimizer.apply(tape.gradient(loss, self.trained), self.trained)
        return loss

    @property
    def trained(self) -> list[Any]:
        return [*self.first.trainable_variables, *self.second.trainable_variables]


class Twice(Own):
    """Sharpness-aware or unrolled steps: the second gradient is that of the new weights."""

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        self.update(x, y)
        return {"loss": self.update(x, y)}


class Target(Own):
    """BYOL, mean teacher, DQN: a slow copy that is moved after the update, and part of the next loss."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = layers.Dense(1, trainable=False)

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.slow.build((None, 4))
        self.slow.set_weights(self.second.get_weights())

    def loss_of(self, x: Any, y: Any) -> Any:
        wanted = tf.stop_gradient(self.slow(self.first(x)))
        return super().loss_of(x, y) + tf.reduce_mean((self(x, training=True) - wanted) ** 2)

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        loss = self.update(x, y)
        for slow, fast in zip(self.slow.variables, self.second.variables, strict=True):
            slow.assign(0.7 * slow + 0.3 * fast)
        return {"loss": loss}


class Clipped(Own):
    """WGAN: weights are clipped after the update."""

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        loss = self.update(x, y)
        for variable in self.trained:
            variable.assign(tf.clip_by_value(variable.value, -0.3, 0.3))
        return {"loss": loss}


class LogsAfter(Own):
    """Logs of the new weights and of the optimizer."""

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        self.update(x, y)
        norm = tf.linalg.global_norm([v.value for v in self.trained])
        rate = self.optimizer.learning_rate
        return {"loss": self.loss_of(x, y), "norm": norm, "rate": rate}


class Penalty(Own):
    """A gradient inside the loss."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            predicted = self(x, training=True)
        slope = tf.norm(tape.gradient(predicted, x), axis=1)
        return self.compute_loss(y=y, y_pred=predicted) + tf.reduce_mean((slope - 1.0) ** 2)


class MetricsAfter(Own):
    """Keras's own step, whose metrics come after the update."""

    train_step = keras.Model.train_step

    def compute_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        norm = tf.linalg.global_norm([v.value for v in self.trained])
        return super().compute_metrics(*args, **kwargs) | {"norm": norm}


AFTER_UPDATE: tuple[type[Own], ...] = (Twice, Target, Clipped, LogsAfter, MetricsAfter)
"""What they do depends on weights that are updated already."""
ALL = (*AFTER_UPDATE, Penalty)


def decaying() -> Any:
    """An optimizer with a rate and a state of its own in each step."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)
    return keras.optimizers.Adam(rate)


def compiled_model(model: type[Own], optimizer: Any, **options: Any) -> Own:
    """Return a compiled model; with Keras's step it has a metric of Keras's and one that reads the optimizer."""

    def rate(y_true: Any, y_pred: Any) -> Any:
        return made.optimizer.learning_rate

    keras.utils.set_random_seed(1)
    made = model()
    made.build((None, 3))
    metrics = ["mae", rate] if model.train_step is keras.Model.train_step else None
    made.compile(optimizer, "mse", metrics=metrics, **options)
    return made
