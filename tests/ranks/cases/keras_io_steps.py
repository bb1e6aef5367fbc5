"""Metric learning, distillation, and steps of one's own as in Keras's guides."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from keras_io_kit import Example, Kit, classes, images, vectors


def embedding_network(kit: Kit, width: int = 4) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(8),
            kit.BatchNormalization(),
            layers.Dense(width),
        ]
    )


class Siamese(keras.Model):
    """Distances between anchor, positive and negative; the margin is the step's own."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.network = embedding_network(kit)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, triple: Any) -> Any:
        anchor, positive, negative = (self.network(one, training=True) for one in triple)
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )

    def _loss(self, data: Any) -> Any:
        near, far = self(data)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(self._loss(data[0]))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


def siamese(kit: Kit) -> keras.Model:
    model = Siamese(kit)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.01)))
    return model


class SimSiam(keras.Model):
    """Two views of an image; no `call`."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.encoder = embedding_network(kit)
        self.predictor = keras.Sequential(
            [layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(4)]
        )
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        one, two = data[0]

        def apart(p: Any, z: Any) -> Any:
            z = tf.stop_gradient(z)
            p, z = ops.normalize(p, axis=1), ops.normalize(z, axis=1)
            return -ops.mean(ops.sum(p * z, axis=1))

        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(one, training=True), self.encoder(two, training=True)
            loss = (apart(self.predictor(z1), z2) + apart(self.predictor(z2), z1)) / 2
        variables = self.encoder.trainable_variables + self.predictor.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def simsiam(kit: Kit) -> keras.Model:
    model = SimSiam(kit)
    model.compile(optimizer=kit.optimizer(keras.optimizers.SGD(0.05, momentum=0.6)))
    return model


def classifier(width: int) -> keras.Model:
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(width, activation="relu"), layers.Dense(3)]
    )


class Distiller(keras.Model):
    """A compile of its own, and a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = classifier(12), classifier(4)
        self.teacher.trainable = False

    def compile(
        self,
        optimizer: Any,
        metrics: Any,
        student_loss_fn: Any,
        distillation_loss_fn: Any,
        alpha: float = 0.1,
        temperature: float = 3.0,
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        taught = self.teacher(x, training=False)
        student = self.student_loss_fn(y, y_pred)
        distilled = self.distillation_loss_fn(
            ops.softmax(taught / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        return self.alpha * student + (1 - self.alpha) * distilled * self.temperature**2

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller(kit: Kit) -> keras.Model:
    model = Distiller()
    model.compile(
        optimizer=kit.optimizer(keras.optimizers.SGD(0.1)),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    return model


class GuideStep(keras.Model):
    """The train_step of Keras's guide, with compiled loss and metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=found)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}


def guide_step(kit: Kit) -> keras.Model:
    inputs = layers.Input((6,))
    model = GuideStep(inputs, layers.Dense(2)(layers.Dense(5, activation="tanh")(inputs)))
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)), loss="mse", metrics=["mae"])
    return model


class LogisticEndpoint(layers.Layer):
    """The endpoint layer of Keras's guide: loss and metric are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, targets: Any, logits: Any) -> Any:
        self.add_loss(self.loss_fn(targets, logits))
        self.accuracy.update_state(targets, logits)
        return ops.sigmoid(logits)


def endpoint(kit: Kit) -> keras.Model:
    inputs, targets = layers.Input((6,), name="inputs"), layers.Input((1,), name="targets")
    logits = layers.Dense(1)(layers.Dense(4, activation="relu")(inputs))
    outputs = LogisticEndpoint()(targets, logits)
    model = keras.Model({"inputs": inputs, "targets": targets}, outputs)
    model.compile(optimizer=kit.optimizer(keras.optimizers.SGD(0.1)))
    return model


class MeanTeacher(keras.Model):
    """Two updates in one step, and a copy of the weights that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.copy = classifier(5), classifier(5)
        self.copy.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for scale in (1.0, 0.5):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x * scale, training=True))
                loss += ops.mean(ops.square(self.copy(x) - self.student(x)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for mine, its in zip(self.student.weights, self.copy.weights, strict=True):
            its.assign(0.8 * its + 0.2 * mine)
        return self.compute_metrics(x, y, self.student(x))


def mean_teacher(kit: Kit) -> keras.Model:
    model = MeanTeacher()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)), loss, metrics=["accuracy"])
    return model


LABELS = classes(65, 3)
MODELS = [
    Example("siamese network", siamese, [images(61), images(62), images(63)]),
    Example("simsiam", simsiam, [images(61), images(62)]),
    Example("distiller", distiller, vectors(64, 6), LABELS),
    Example("step of the guide", guide_step, vectors(66, 6), vectors(67, 2)),
    Example("endpoint layer", endpoint, {"inputs": vectors(68, 6), "targets": classes(69, 2, 1)}),
    Example("mean teacher", mean_teacher, vectors(70, 6), LABELS),
]
