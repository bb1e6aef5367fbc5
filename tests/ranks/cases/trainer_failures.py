"""Everything that ranks can disagree about. All of them raise, so that one launch can try everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from small import RANK, layers, optimizers

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.reduction import GradientReducer
from hvdtrain.keras import DistributedOptimizer, Sum

BATCH = 8
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LAST = RANK == 1


def model(width: int = 4) -> keras.Model:
    return keras.Sequential([layers.Input((3,)), layers.Dense(width), layers.Dense(1)])


def trainer(make: Any = model, **kwargs: Any) -> hvdtrain.Trainer:
    arguments = {"optimizer": optimizers.SGD(0.05), "loss": "mse", "global_batch_size": BATCH}
    return hvdtrain.Trainer(make, **arguments | kwargs)


def fit(trained: hvdtrain.Trainer, *data: Any, **kwargs: Any) -> None:
    trained.fit(*(data or (X, Y)), **{"epochs": 3, "verbose": 0} | kwargs)


def message(run: Callable[[], None]) -> str:
    """The error's class and message."""
    try:
        run()
    except hvdtrain.HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def case_reduction_removed(**fit_arguments: Any) -> str:
    def not_reduced(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return list(gradients)

    with mock.patch.object(GradientReducer, "__call__", not_reduced):
        return message(lambda: fit(trainer(), **fit_arguments))


def case_reduction_removed_in_a_continued_run() -> str:
    return case_reduction_removed(initial_epoch=1)


def case_reduction_of_one_variable_removed() -> str:
    """Of the last variable only."""
    whole = GradientReducer.__call__

    def partly(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return [*whole(self, gradients, *args, **kwargs)[:-1], gradients[-1]]

    with mock.patch.object(GradientReducer, "__call__", partly):
        return message(lambda: fit(trainer()))


def case_weight_changed_on_one_rank() -> str:
    def change(batch: int, logs: Any) -> None:
        if LAST and batch == 2:
            kernel = trained.model.layers[1].kernel
            kernel.assign(kernel + 0.25)

    trained = trainer()
    changing = keras.callbacks.LambdaCallback(on_train_batch_end=change)
    return message(lambda: fit(trained, callbacks=[changing]))


def case_optimizer_changed_on_one_rank() -> str:
    def change(epoch: int, logs: Any) -> None:
        if LAST:
            trained.model.optimizer.learning_rate = 0.5

    trained = trainer()
    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    return message(lambda: fit(trained, callbacks=[changing]))


def case_disagreements() -> dict[str, str]:
    """What differs on the last rank -> the error."""
    wider = np.concatenate([X, X], axis=1)
    wide = lambda: keras.Sequential([layers.Input((6,)), layers.Dense(1)])  # noqa: E731
    other = {"validation_data": (X[:9], Y[:9])}
    checked = keras.callbacks.EarlyStopping("loss")
    looking = keras.callbacks.LambdaCallback(on_train_batch_end=print if LAST else None)
    saved = {"run_dir": "not-made", "checkpoints": hvdtrain.Checkpoints(3 if LAST else 2)}
    return {
        "input shape": message(
            lambda: fit(trainer(wide if LAST else model), wider if LAST else X, Y)
        ),
        "examples": message(lambda: fit(trainer(), *((X[:32], Y[:32]) if LAST else (X, Y)))),
        "steps": message(lambda: fit(trainer(), steps_per_epoch=4 if LAST else 5)),
        "content": message(lambda: fit(trainer(), X[:: -1 if LAST else 1], Y)),
        "labels": message(lambda: trainer().evaluate(X, Y[:: -1 if LAST else 1])),
        "dtype": message(lambda: fit(trainer(), X.astype("int32") if LAST else X, Y)),
        "metrics": message(lambda: fit(trainer(metrics=[] if LAST else ["mae"]))),
        "model": message(lambda: fit(trainer(lambda: model(5 if LAST else 4)))),
        "layers": message(lambda: fit(trainer(wide_and_deep if LAST else model))),
        "statistics": message(lambda: fit(trainer(lambda: normalized(float(RANK))))),
        "adapted": message(lambda: fit(trainer(adapted(X[RANK::2])))),
        "batch size": message(lambda: fit(trainer(global_batch_size=4 if LAST else 8))),
        "learning rate": message(
            lambda: fit(trainer(optimizer=optimizers.SGD(0.1 if LAST else 0.05)))
        ),
        "optimizer": message(lambda: fit(trainer(optimizer="adam" if LAST else "sgd"))),
        "epochs": message(lambda: fit(trainer(), epochs=2 if LAST else 3)),
        "validation": message(lambda: fit(trainer(), **(other if LAST else {}))),
        "validation content": message(
            lambda: fit(trainer(), validation_data=(X[:: -1 if LAST else 1], Y))
        ),
        "callbacks": message(lambda: fit(trainer(), callbacks=[checked] if LAST else [])),
        "callbacks of steps": message(lambda: fit(trainer(), callbacks=[looking])),
        "validation_freq": message(lambda: fit(trainer(), validation_freq=1 + LAST)),
        "on_nan": message(lambda: fit(trainer(on_nan="stop" if LAST else "warn"))),
        "checkpoints": message(lambda: fit(trainer(**saved))),
        "evaluate": message(lambda: trainer().evaluate(X[: 20 + RANK], Y[: 20 + RANK])),
        "predict": message(lambda: trainer().predict(X[: 20 + RANK])),
    }


def wide_and_deep() -> keras.Model:
    return keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(4), layers.Dense(1)])


def normalized(mean: float) -> keras.Model:
    layer = layers.Normalization(mean=mean, variance=1.0)
    return keras.Sequential([layers.Input((3,)), layer, layers.Dense(1)])


def adapted(x: np.ndarray | None) -> keras.Model:
    layer = layers.Normalization()
    network = keras.Sequential([layers.Input((3,)), layer, layers.Dense(1)])
    if x is not None:
        layer.adapt(x)
    return network


def case_adapted_by_one_rank() -> list[list[float]]:
    """The others leave it to rank 0; and all of them adapt to the same data, in another order."""
    found = []
    for mine in (X if not RANK else None, X[:: 1 - 2 * RANK]):
        trained = trainer(adapted(mine))
        fit(trained)
        found.append(np.ravel(trained.model.layers[0].mean).tolist())
    return [*found, X.mean(axis=0).tolist()]


def batches(count: int, shift: float = 0.0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for _ in range(count):
        yield X[:BATCH] + shift, Y[:BATCH]


def case_streams() -> dict[str, str]:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=RANK).batch(BATCH)
    shard = tf.data.Dataset.from_tensor_slices((X, Y)).shard(2, RANK).batch(BATCH)
    return {
        "length": message(lambda: fit(trainer(), lambda: batches(3 + RANK))),
        "shorter": message(lambda: fit(trainer(), lambda: batches(4 - RANK))),
        "shuffle": message(lambda: fit(trainer(), dataset)),
        "shard": message(lambda: fit(trainer(), shard)),
        "content": message(lambda: fit(trainer(), lambda: batches(3, float(RANK)))),
        "once": message(lambda: fit(trainer(), batches(3))),
    }


def case_usage() -> dict[str, str]:
    """The same mistake on every rank."""
    return {
        "no loss": message(lambda: fit(trainer(loss=None))),
        "lengths": message(lambda: fit(trainer(), X, Y[:-1])),
        "batch size": message(lambda: fit(trainer(global_batch_size=1))),
        "empty": message(lambda: fit(trainer(), X[:0], Y[:0])),
        "endless": message(
            lambda: fit(trainer(), tf.data.Dataset.from_tensor_slices((X, Y)).repeat())
        ),
        "op": message(lambda: trainer(optimizer=DistributedOptimizer(optimizers.SGD(), op=Sum))),
        "model": message(lambda: trainer(lambda: 3)),
        "scaling": message(lambda: trainer(learning_rate_scaling="cubic")),
        "precision": message(lambda: trainer(precision="float7")),
        "optimizer": message(lambda: trainer(optimizer="sdg")),
        "compiled anew": message(lambda: changed(lambda model: model.compile("adam", "mse"))),
        "frozen": message(lambda: changed(lambda m: setattr(m.layers[0], "trainable", False))),
        "whole batch": message(lambda: fit(trainer(loss=keras.losses.Dice()))),
        "several optimizers": message(lambda: trainer(optimizer=several())),
        **{
            name: message(lambda kind=kind, eager=eager: fit(reducing(kind, eager)))
            for name, kind, eager in (
                ("own allreduce", AveragesEach, False),
                ("own allreduce, eagerly", AveragesEach, True),
                ("own grouped_allreduce", AveragesAll, False),
                ("own tape", OwnTape, False),
            )
        },
    }


class AveragesEach(keras.Sequential):
    """Its gradients are those of a script for Horovod with a step of its own."""

    def tape(self) -> Any:
        return tf.GradientTape()

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return [hvd.allreduce(gradient) for gradient in gradients]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with self.tape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        gradients = self.averaged(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class AveragesAll(AveragesEach):
    def averaged(self, gradients: list[Any]) -> list[Any]:
        return [2.0 * gradient / 2.0 for gradient in hvd.grouped_allreduce(gradients)]


class OwnTape(AveragesEach):
    def tape(self) -> Any:
        return hvd.DistributedGradientTape(tf.GradientTape())

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return gradients


def reducing(kind: type[AveragesEach], eagerly: bool) -> hvdtrain.Trainer:
    return trainer(
        kind([layers.Input((3,)), layers.Dense(4), layers.Dense(1)]), run_eagerly=eagerly
    )


def changed(change: Callable[[keras.Model], Any]) -> None:
    """Train, change the model, and train again."""
    trained = trainer()
    fit(trained)
    change(trained.model)
    fit(trained)


def several() -> Any:
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD()))
