"""Logs and metrics of the Trainer on any number of ranks against plain Keras in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from against_keras import BATCH, SGD, one_process, relative, vector_model, vectors
from keras import layers, ops
from own_metrics import last_value, own_metrics

import hvdtrain
from hvdtrain.errors import ReplicaError

EPOCHS = 2


def compared(
    make: Callable[[], keras.Model],
    make_metrics: Callable[[], list[Any]] = list,
    *,
    examples: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **trainer: Any,
) -> dict[str, Any]:
    """How far each log is from plain Keras's, relative above 1, and what the Trainer warned of."""
    x, y = (array[:examples] for array in vectors())
    fit = {"epochs": EPOCHS, "validation_data": (x[:9], y[:9])}
    compiled = {"loss": "mse", "metrics": make_metrics()}
    _, wanted = one_process(make, SGD(0.05), (x, y), fit, compiled | {"run_eagerly": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = hvdtrain.Trainer(
            make,
            SGD(0.05),
            "mse",
            make_metrics(),
            global_batch_size=BATCH,
            seed=1,
            **trainer,
        )
        history = trained.fit(
            x,
            y,
            validation_data=(x[:9], y[:9]),
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history
    assert set(history) == set(wanted), (set(history), set(wanted))
    return {
        "apart": {name: relative(history[name], wanted[name]) for name in wanted},
        "warnings": [str(w.message) for w in caught if w.category is UserWarning],
        "history": history,
    }


class Guide(keras.Model):
    """The words of Keras's guide: a train_step, and trackers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def step(self, data: Any, training: bool) -> tuple[Any, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            predicted = self(x, training=training)
            errors = ops.square(y - predicted)
            loss = ops.mean(errors)
        if training:
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.track(errors)
        self.error.update_state(y, predicted)
        return loss, predicted

    def track(self, errors: Any) -> None:
        self.tracker.update_state(ops.mean(errors))

    def train_step(self, data: Any) -> Any:
        self.step(data, True)
        return {"loss": self.tracker.result(), "mae": self.error.result()}

    def test_step(self, data: Any) -> Any:
        self.step(data, False)
        return {"loss": self.tracker.result(), "mae": self.error.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.error]


class Summing(Guide):
    """Its tracker gets the sum over the batch, of which Mean makes a mean over the batches."""

    def track(self, errors: Any) -> None:
        self.tracker.update_state(ops.sum(errors))


class Weighted(Guide):
    """Its tracker weighs the mean over a batch by the batch's examples."""

    def track(self, errors: Any) -> None:
        self.tracker.update_state(ops.mean(errors), sample_weight=ops.shape(errors)[0])


class OwnNames(Guide):
    """Results under other names, and values of the last batch."""

    def train_step(self, data: Any) -> Any:
        loss, predicted = self.step(data, True)
        return {
            "running": self.tracker.result(),
            "error": self.error.result(),
            "rate": self.optimizer.learning_rate,
            "batch_loss": loss,
            "largest": ops.max(predicted),
            "root": ops.sqrt(self.tracker.result()),
        }


class Sizes(Guide):
    """Numbers that add up over the parts of a batch."""

    def train_step(self, data: Any) -> Any:
        _, predicted = self.step(data, True)
        return {
            "loss": self.tracker.result(),
            "examples": ops.shape(predicted)[0],
            "positive": ops.sum(ops.cast(data[1] > 0, "float32")),
            "error": ops.sum(ops.abs(data[1] - predicted)),
            "rate": self.optimizer.learning_rate,
        }


class Unlisted(Guide):
    """A metric that Keras does not reset between epochs, as the model does not list it."""

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


class WithRate(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "lr": self.optimizer.learning_rate}


class Added(keras.Sequential):
    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_metrics(*args, **kwargs) | {"constant": 3.0}


class Compiled(Guide):
    """A step that is compiled already hides which values are results."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        self.step(data, True)
        return {"mae": self.error.result(), "rate": ops.convert_to_tensor(0.25)}


def sequential(kind: Any) -> Callable[[], keras.Model]:
    return lambda: kind([layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])


class EachBatch(keras.callbacks.Callback):
    """Looks at the logs of each step, which are then merged in each."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs


def case_logs() -> dict[str, Any]:
    """Names beside those of the metrics, in all ways of running a step."""
    return {
        "guide": compared(Guide),
        "sums": compared(Summing),
        "weighted": compared(Weighted),
        "one example in the last step": compared(OwnNames),
        **{
            f"own names, {way}": compared(OwnNames, examples=5 * BATCH - 3, **{way: value})
            for way, value in (("run_eagerly", True), ("steps_per_execution", 2))
        },
        "sums of the last step": compared(Sizes, examples=5 * BATCH - 3),
        "sums of shares of equal size": compared(Sizes, examples=4 * BATCH),
        "sums, one example in the last step": compared(Sizes),
        "unlisted": compared(Unlisted),
        "each batch": compared(Guide, callbacks=[EachBatch()]),
        "rate": compared(sequential(WithRate), lambda: ["mae"]),
        "rate, jit_compile": compared(sequential(WithRate), lambda: ["mae"], jit_compile=True),
        "added": compared(sequential(Added), lambda: ["mae"]),
        "compiled": compared(Compiled),
    }


def all_metrics() -> list[Any]:
    return [*own_metrics(), last_value()]


def ratio(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(y_true * y_pred) / ops.sum(ops.abs(y_pred))


def case_metrics() -> dict[str, Any]:
    return {
        "uneven": compared(vector_model, all_metrics),  # The last batch has one example.
        "even": compared(vector_model, all_metrics, examples=5 * BATCH),
        "several": compared(vector_model, all_metrics, steps_per_execution=2),
        "jit_compile": compared(vector_model, all_metrics, jit_compile=True),
        "inexact": compared(vector_model, lambda: [ratio]),
    }


def case_other_rules() -> str:
    """A metric that is another one on another rank."""
    from hvdtrain.collectives.metrics import merge_state
    from hvdtrain.runtime import load_horovod

    metric = keras.metrics.Mean()
    metric.update_state([1.0])
    rank = load_horovod().rank()
    rules = {id(v.value): "max" for v in metric.variables} if rank else {}
    try:
        merge_state([metric], rules=rules)
    except ReplicaError as error:
        return str(error)
    return "no error"


class Counting(layers.Layer):
    """Counts steps, in a float."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight(initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1.0)
        return x


def case_counter_of_a_layer() -> list[float]:
    """With an idle rank in the last step of each epoch."""
    x, y = vectors()
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential([layers.Input((3,)), Counting(), layers.Dense(1)]),
        SGD(0.05),
        "mse",
        global_batch_size=BATCH,
    )
    trainer.fit(x, y, epochs=EPOCHS, verbose=0)
    return [float(np.asarray(trainer.model.layers[0].steps))]


def case_model_fit() -> dict[str, Any]:
    """MetricAverageCallback with shares of unequal size; weights that stay, so that an epoch is an evaluation."""
    import hvdtrain.keras as hvd

    x, y = vectors()
    cut = [0, 50, len(x)]
    own = slice(cut[hvd.rank()], cut[hvd.rank() + 1])
    keras.utils.set_random_seed(1)
    model = vector_model()
    chosen = [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score(), own_metrics()[3]]
    optimizer = hvd.DistributedOptimizer(SGD(0.0))
    model.compile(optimizer, "mse", metrics=chosen, jit_compile=False)
    expected = model.evaluate(x, y, batch_size=BATCH, return_dict=True, verbose=0)
    history = model.fit(
        x[own],
        y[own],
        batch_size=BATCH,
        shuffle=False,
        steps_per_epoch=2,  # 32 and 31 examples.
        validation_data=(x[own], y[own]),
        callbacks=[hvd.callbacks.MetricAverageCallback()],
        verbose=0,
    ).history
    seen = np.r_[0:32, 50 : len(x)]
    trained = model.evaluate(x[seen], y[seen], batch_size=BATCH, return_dict=True, verbose=0)
    names = ("loss", "root_mean_squared_error", "r2_score")
    return {
        "training": max(relative(history[n][0], trained[n]) for n in names),
        "validation": max(relative(history[f"val_{n}"][0], expected[n]) for n in names),
        "steps": history["steps"][0],
    }
