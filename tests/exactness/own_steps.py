"""Models with a training step, or a loss, of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops


def of_class(
    kind: type[keras.Model], inputs: Any, layers: Sequence[Callable[[Any], Any]]
) -> keras.Model:
    """Return a functional model of this class."""
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    return kind(inputs, outputs)


class Guide(keras.Model):
    """The step of Keras's guide."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=found)
        self.apply(tape.gradient(loss, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}

    def apply(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))


class ByHand(keras.Model):
    """A loss by hand, and a tracker of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def own_loss(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p))

    def apply(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        self.apply(tape.gradient(loss, self.trainable_variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class SumByHand(ByHand):
    def own_loss(self, y: Any, p: Any) -> Any:
        return 0.1 * ops.sum(ops.square(y - p))


class SumByBatchSize(ByHand):
    """The batch's size comes from its shape."""

    def own_loss(self, y: Any, p: Any) -> Any:
        return ops.sum(ops.square(y - p)) / ops.cast(ops.shape(y)[0], p.dtype)


class SumByFixedSize(ByHand):
    """As loops for several workers do: divided by the global batch size."""

    def own_loss(self, y: Any, p: Any) -> Any:
        return ops.sum(ops.square(y - p)) / 8.0


class VectorByHand(ByHand):
    """A tape adds up a vector."""

    def own_loss(self, y: Any, p: Any) -> Any:
        return 0.2 * ops.mean(ops.square(y - p), axis=-1)


class RootByHand(ByHand):
    def own_loss(self, y: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y - p)))


class ClippedByHand(ByHand):
    """Clips by the norm of the gradients that it has found."""

    def apply(self, gradients: Any) -> None:
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        super().apply(clipped)


class NormalizedByHand(ByHand):
    def apply(self, gradients: Any) -> None:
        super().apply([g / (tf.norm(g) + 1e-3) for g in gradients])


class SignsByHand(ByHand):
    def apply(self, gradients: Any) -> None:
        super().apply([tf.sign(g) for g in gradients])


class ScaledByHand(ByHand):
    """What is linear in the gradient."""

    def apply(self, gradients: Any) -> None:
        super().apply([0.5 * g for g in gradients])


class DecayedByHand(ByHand):
    """A decay of the weights, added to the gradients."""

    def apply(self, gradients: Any) -> None:
        pairs = zip(gradients, self.trainable_variables, strict=True)
        super().apply([g + 0.1 * v for g, v in pairs])


class AssignedByHand(ByHand):
    """No optimizer at all."""

    def apply(self, gradients: Any) -> None:
        for gradient, variable in zip(gradients, self.trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)


class SkippedByHand(ByHand):
    """Leaves out steps whose loss is large."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        keep = self.factor(loss)
        self.apply([keep * g for g in gradients])
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def factor(self, loss: Any) -> Any:
        return tf.cast(loss < 1.5, tf.float32)


class SkippedInPython(SkippedByHand):
    """Decides in Python."""

    def factor(self, loss: Any) -> Any:
        return 1.0 if float(loss) < 1.5 else 0.0


class NoisyByHand(ByHand):
    """Random numbers in the step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noise = keras.random.SeedGenerator(1)

    def train_step(self, data: Any) -> Any:
        x, y = data
        noise = keras.random.normal(ops.shape(x), seed=self.noise)
        return super().train_step((x + 0.1 * noise, y))


class TwoUpdates(Guide):
    def apply(self, gradients: Any) -> None:
        super().apply(gradients)
        super().apply([0.5 * g for g in gradients])


class TwoOptimizers(ByHand):
    """The last layer has an optimizer of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.second = keras.optimizers.Adam(0.01)

    def apply(self, gradients: Any) -> None:
        first, last = self.trainable_variables[:-2], self.trainable_variables[-2:]
        self.optimizer.apply(gradients[:-2], first)
        self.second.apply(gradients[-2:], last)


class Follower(Guide):
    """A moving average of the weights, made after they have changed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.average = self.add_weight(
            shape=self.trainable_variables[-1].shape, initializer="zeros", trainable=False
        )

    def apply(self, gradients: Any) -> None:
        super().apply(gradients)
        self.average.assign(0.9 * self.average + 0.1 * self.trainable_variables[-2][0])


class Ahead(Guide):
    """Sharpness-aware: the gradient where the first one leads."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        first = tape.gradient(loss, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, first, strict=True):
            variable.assign_add(0.05 * gradient)
        with tf.GradientTape() as tape:
            ahead = self.compute_loss(y=y, y_pred=self(x, training=True))
        second = tape.gradient(ahead, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, first, strict=True):
            variable.assign_sub(0.05 * gradient)
        self.apply(second)
        return self.compute_metrics(x, y, self(x))


class InputPenalty(Guide):
    """A gradient within the loss, as in WGAN-GP."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
            slope = inner.gradient(found, x)
            loss = self.compute_loss(y=y, y_pred=found)
            loss += 0.1 * ops.mean(ops.square(ops.norm(slope, axis=1) - 1.0))
        self.apply(tape.gradient(loss, self.trainable_variables))
        return self.compute_metrics(x, y, found)


class OwnLoss(keras.Model):
    """A compute_loss of its own: the mean."""

    def own_loss(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.own_loss(y, y_pred)


class OwnSum(OwnLoss):
    def own_loss(self, y: Any, p: Any) -> Any:
        return 0.1 * ops.sum(ops.square(y - p))


class OwnVector(OwnLoss):
    def own_loss(self, y: Any, p: Any) -> Any:
        return 0.2 * ops.mean(ops.square(y - p), axis=-1)


class OwnContrastive(OwnLoss):
    def own_loss(self, y: Any, p: Any) -> Any:
        logits = ops.matmul(p, ops.transpose(y))
        own = ops.eye(ops.shape(logits)[0])
        return ops.mean(ops.categorical_crossentropy(own, logits, from_logits=True))


class _Logging(keras.Model):
    """Returns more than its metrics."""

    def more(self, data: Any) -> dict[str, Any]:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), **self.more(data)}


class LogsRate(_Logging):
    def more(self, data: Any) -> dict[str, Any]:
        return {"rate": self.optimizer.learning_rate}


class LogsMean(_Logging):
    def more(self, data: Any) -> dict[str, Any]:
        return {"mean": ops.mean(self(data[0]))}


class LogsLargest(_Logging):
    def more(self, data: Any) -> dict[str, Any]:
        return {"largest": ops.max(self(data[0]))}


class LogsNorm(_Logging):
    """The norm of the weights, which is alike on all workers."""

    def more(self, data: Any) -> dict[str, Any]:
        return {"norm": tf.linalg.global_norm([v.value for v in self.trainable_variables])}


class LogsScaled(keras.Model):
    """The metrics' results, under names and in units of its own."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {"error": logs["loss"] * 100.0}


class AddsMetric(keras.Model):
    """compute_metrics with one more metric."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extra = keras.metrics.Mean(name="extra")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.extra.update_state(ops.mean(ops.abs(y_pred), axis=-1))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "again": 1.0}


class OwnTest(Guide):
    """A test step of its own."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        found = self(x, training=False)
        self.compute_loss(y=y, y_pred=found)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}
