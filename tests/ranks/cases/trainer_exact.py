"""Trainer on any number of ranks against plain Keras in one process with the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from against_keras import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    PADDED,
    RNG,
    SGD,
    SOME_IGNORED,
    TOKENS,
    VALID,
    WEIGHT,
    Y,
    apart,
    inputs,
    mixed_model,
    momentum,
    plain,
    relative,
    tagging_model,
    vector_model,
    vectors,
)
from references import reference
from results import Apart, far
from small import RANK, SIZE, crossentropy, difference, layers, optimizers, weights

import hvdtrain
from hvdtrain.keras import SyncBatchNormalization, check_replicas


def case_sgd() -> dict[str, Any]:
    validation = ({"image": VALID[0], "words": VALID[1]}, Y[:37], WEIGHT[:37])
    return apart(
        mixed_model,
        momentum,
        (inputs(), Y),
        fit={"validation_data": validation},
        compiled=lambda: {"metrics": ["accuracy"]},
    )


def case_adam() -> dict[str, Any]:
    return apart(
        mixed_model,
        lambda: optimizers.Adam(1e-3),
        (inputs(), Y, WEIGHT),
        compiled=lambda: {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
    )


def case_adamw() -> dict[str, Any]:
    by_class = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0, 4: 3.0}
    return apart(
        mixed_model, lambda: optimizers.AdamW(1e-3), (inputs(), Y), fit={"class_weight": by_class}
    )


def case_losses() -> dict[str, Any]:
    """Reductions that do not average over examples, and penalties."""
    labels = RNG.integers(0, 5, PADDED.shape)
    found = {}
    for reduction in ("sum", "mean_with_sample_weight"):
        found[reduction] = apart(
            mixed_model,
            lambda: SGD(0.003),
            (inputs(), Y, WEIGHT),
            compiled=lambda reduction=reduction: {"loss": crossentropy(reduction=reduction)},
        )
    found["mask"] = apart(tagging_model, lambda: SGD(0.5), (PADDED, labels))
    found["ignore_class"] = apart(
        mixed_model,
        momentum,
        (inputs(), SOME_IGNORED, WEIGHT),
        compiled=lambda: {"loss": crossentropy(ignore_class=-1)},
    )
    found["penalties"] = apart(lambda: mixed_model(penalties=True), momentum, (inputs(), Y))
    return found


class Activity(layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def case_two_outputs() -> dict[str, Any]:
    """Loss weights, one loss object for two masked outputs, metrics with many counters, add_loss."""

    def make() -> keras.Model:
        words = layers.Input((6,), dtype="int32")
        word = layers.Embedding(TOKENS, 4, mask_zero=True)(words)
        tags, again = layers.Dense(5, name="tags")(word), layers.Dense(5, name="again")(word)
        mean = Activity()(layers.GlobalAveragePooling1D()(word))
        flag = layers.Dense(1, activation="sigmoid", name="flag")(mean)
        return keras.Model(words, {"tags": tags, "again": again, "flag": flag})

    def compiled() -> dict[str, Any]:
        shared = crossentropy()
        counters = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
        return {
            "loss": {"tags": shared, "again": shared, "flag": "binary_crossentropy"},
            "loss_weights": {"tags": 1.0, "again": 0.5, "flag": 2.0},
            "metrics": {"flag": counters, "tags": ["accuracy"]},
        }

    labels = {
        "tags": RNG.integers(0, 5, PADDED.shape),
        "again": RNG.integers(0, 5, PADDED.shape),
        "flag": RNG.integers(0, 2, (EXAMPLES, 1)),
    }
    # Keras weighs each output's loss by the batch's size only where the size is known; eagerly it is.
    eager = {"run_eagerly": True}
    return apart(make, momentum, (PADDED, labels), compiled=compiled, reference=eager)


def case_synchronized_normalization() -> dict[str, Any]:
    """SyncBatchNormalization on all ranks is BatchNormalization on one, an idle rank included."""
    synced = hvdtrain.Trainer(
        lambda: mixed_model(normalization=SyncBatchNormalization),
        momentum(),
        crossentropy(),
        global_batch_size=BATCH,
        seed=1,
    )
    history = synced.fit(inputs(), Y, epochs=EPOCHS, shuffle=False, verbose=0).history
    wanted = plain(
        lambda: mixed_model(normalization=layers.BatchNormalization), momentum(), (inputs(), Y)
    )
    return {
        "weights": wanted.apart([v.numpy() for v in synced.model.weights], "all"),
        "history": wanted.apart(history, "history", "relative"),
        "histories": history,
    }


def case_ordinary_normalization() -> list[float]:
    """The statistics are the same on all ranks, finite, and an idle rank's filler is not in them."""
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential(
            [layers.Input((2,)), layers.BatchNormalization(momentum=0.0), layers.Dense(1)]
        ),
        SGD(0.01),
        "mse",
        global_batch_size=4,
    )
    x = np.array([[0, 1], [1, 0], [2, 5], [3, 4], [1e6, -1e6]], "float32")
    trainer.fit(x, x[:, :1] * 0, shuffle=False, verbose=0)
    check_replicas(trainer.model)
    return [float(v) for v in trainer.model.layers[0].moving_mean.numpy()]


def case_numpy() -> dict[str, float]:
    """One dense layer, mean squared error, SGD: by hand."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(29, 3)), rng.normal(size=(29, 2))
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential([layers.Input((3,)), layers.Dense(2)]),
        SGD(0.1, momentum=0.5),
        "mse",
        global_batch_size=7,
    )
    start = [w.astype("float64") for w in weights(trainer.model)]
    history = trainer.fit(x, y, epochs=6, shuffle=False, verbose=0).history
    w, b = start
    velocity = [np.zeros_like(w), np.zeros_like(b)]
    losses = []
    for _ in range(6):
        total = 0.0
        for begin in range(0, 29, 7):
            part, target = x[begin : begin + 7], y[begin : begin + 7]
            error = part @ w + b - target
            total += float((error**2).mean(axis=1).sum())
            gradient = 2 * error / error.size
            for i, g in enumerate((part.T @ gradient, gradient.sum(axis=0))):
                velocity[i] = 0.5 * velocity[i] - 0.1 * g
            w, b = w + velocity[0], b + velocity[1]
        losses.append(total / 29)
    return {
        "weights": difference(weights(trainer.model), [w, b]),
        "history": relative(history["loss"], losses),
    }


def case_shuffled() -> Apart:
    """The order of examples is that of seed and epoch, whatever the number of ranks."""
    x, y = vectors()
    trainer = hvdtrain.Trainer(vector_model, momentum(), "mse", global_batch_size=BATCH, seed=1)
    trainer.fit(x, y, epochs=3, verbose=0)

    def in_order() -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        model = vector_model()
        model.compile(momentum(), "mse", jit_compile=False)
        for epoch in range(3):
            order = np.random.default_rng([1, epoch]).permutation(EXAMPLES)
            model.fit(x[order], y[order], batch_size=BATCH, shuffle=False, verbose=0)
        return {"weights": weights(model)}

    return reference(in_order, any_size=True).apart(weights(trainer.model), "weights")


class Batches(keras.utils.PyDataset):
    """Batches of 7, which the Trainer joins to global ones."""

    def __len__(self) -> int:
        return -(-EXAMPLES // 7)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = vectors()
        return x[7 * index : 7 * index + 7], y[7 * index : 7 * index + 7]


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    data = Batches()
    return (data[i] for i in range(len(data)))


def case_sources() -> dict[str, Any]:
    x, y = vectors()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    steps = {"steps_per_epoch": 4}  # Passes have six: every other epoch ends early.
    sources: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "unbatched": (lambda: dataset, {}),
        "batched": (lambda: dataset.batch(10), {}),
        "PyDataset": (Batches, {}),
        "function": (lambda: batches, {}),
        "generator": (batches, {"epochs": 1}),
        "endless": (lambda: dataset.repeat(), {"steps_per_epoch": 5}),
        "arrays": (lambda: (x, y), steps),
    }
    # Without an end: five full batches an epoch, read on from pass to pass.
    rows = np.arange(EPOCHS * 5 * BATCH) % EXAMPLES
    mse = {"loss": "mse"}
    whole = plain(vector_model, momentum(), (x, y), {}, mse)
    once = plain(vector_model, momentum(), (x, y), {"epochs": 1}, mse)
    read_on = plain(vector_model, momentum(), (x[rows], y[rows]), {"epochs": 1}, mse)
    parts = plain(vector_model, momentum(), (x, y), steps, mse)
    found = {}
    for name, (source, fit) in sources.items():
        wanted = {"arrays": parts, "endless": read_on, "generator": once}.get(name, whole)
        trainer = hvdtrain.Trainer(vector_model, momentum(), "mse", global_batch_size=BATCH, seed=1)
        history = trainer.fit(
            source(), **{"epochs": EPOCHS, "shuffle": False, "verbose": 0} | fit
        ).history
        found[name] = {
            "weights": wanted.apart(weights(trainer.model), "weights"),
            "history": wanted.apart(np.mean(history["loss"]), "mean loss", "relative"),
        }
    evaluated = [
        trainer.evaluate(given, steps=3, verbose=0)
        for given in (dataset.repeat(), dataset.repeat(), (x, y), batches)
    ]
    found["evaluate"] = {"apart": max(relative(v, evaluated[0]) for v in evaluated)}
    found["predict"] = {
        "apart": difference([trainer.predict(batches)], [trainer.predict(dataset)]),
        "order": difference([trainer.predict(x)], [trainer.model(x).numpy()]),
    }
    return found


def case_validation_split() -> dict[str, Any]:
    wanted = plain(vector_model, momentum(), vectors(), {"validation_split": 0.25}, {"loss": "mse"})
    trainer = hvdtrain.Trainer(vector_model, momentum(), "mse", global_batch_size=BATCH, seed=1)
    history = trainer.fit(
        *vectors(), validation_split=0.25, epochs=EPOCHS, shuffle=False, verbose=0
    ).history
    return {"history": wanted.apart(history, "history", "relative")}


def case_ways_of_running() -> dict[str, Any]:
    def vector(**trainer: Any) -> dict[str, Any]:
        return apart(
            vector_model,
            momentum,
            vectors(),
            trainer=trainer,
            compiled=lambda: {"loss": "mse", "metrics": ["mae"]},
        )

    found = {
        "jit_compile": vector(jit_compile=True),
        "run_eagerly": vector(run_eagerly=True),
        "steps_per_execution": vector(steps_per_execution=2),
        "steps_per_execution, jit_compile": vector(steps_per_execution=2, jit_compile=True),
        "mask, jit_compile": apart(
            tagging_model,
            lambda: SGD(0.5),
            (PADDED, RNG.integers(0, 5, PADDED.shape)),
            trainer={"jit_compile": True},
        ),
        "accumulate": apart(
            vector_model,
            lambda: SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
            vectors(),
            compiled=lambda: {"loss": "mse"},
        ),
        "custom train_step": apart(
            custom_model, momentum, vectors(), compiled=lambda: {"loss": "mse"}
        ),
        "custom train_step, jit_compile": apart(
            guide_model,
            momentum,
            vectors(),
            trainer={"jit_compile": True},
            compiled=lambda: {"loss": "mse"},
        ),
        "custom train_step, accumulate": apart(
            guide_model,
            lambda: SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
            vectors(),
            compiled=lambda: {"loss": "mse"},
        ),
    }
    keras.utils.set_random_seed(1)
    compiled = vector_model()
    compiled.compile(momentum(), "mse", metrics=["mae"], jit_compile=False)
    trainer = hvdtrain.Trainer(compiled, global_batch_size=BATCH)
    history = trainer.fit(*vectors(), epochs=EPOCHS, shuffle=False, verbose=0).history
    eager = found["run_eagerly"]["histories"]
    found["compiled model"] = {"history": far(history, eager, "relative")}
    return found


class Custom(keras.Model):
    """A train_step of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.update(gradients, variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}

    def update(self, gradients: Any, variables: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))


class Guide(Custom):
    """In the words of Keras's guide."""

    def update(self, gradients: Any, variables: Any) -> None:
        self.optimizer.apply(gradients, variables)


def custom_model() -> keras.Model:
    return Custom()


def guide_model() -> keras.Model:
    return Guide()


def case_precision() -> dict[str, Any]:
    """16-bit activations: replicas equal, and close to one process for all their rounding."""
    found = {}
    for precision in ("mixed_bfloat16", "mixed_float16"):
        try:
            trainer = hvdtrain.Trainer(
                vector_model,
                SGD(0.05),
                "mse",
                global_batch_size=BATCH,
                seed=1,
                precision=precision,
            )
            assert trainer.model.layers[0].compute_dtype == precision.removeprefix("mixed_")
            trainer.fit(*vectors(), epochs=2, shuffle=False, verbose=0)
            predicted = trainer.predict(vectors()[0])
            wanted = plain(vector_model, SGD(0.05), vectors(), {"epochs": 2}, {"loss": "mse"})
        finally:
            keras.config.set_dtype_policy("float32")
        found[precision] = {
            "weights": wanted.apart(weights(trainer.model), "weights"),
            "predictions": len(predicted),
        }
    return found


def case_seeds() -> dict[str, Any]:
    """Initial weights are equal, dropout masks are not."""
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential([layers.Input((50,)), layers.Dropout(0.5), layers.Dense(50)]),
        SGD(0.0),
        "mse",
        global_batch_size=BATCH,
    )
    x = np.ones((BATCH, 50), "float32")
    start = float(weights(trainer.model)[0].sum())
    trainer.fit(x, x, verbose=0)
    mask = np.asarray(trainer.model.layers[0](x[:1], training=True))[0] > 0
    return {"start": start, "mask": mask.astype(int).tolist()}


def case_fit_again() -> dict[str, float]:
    """A second fit goes on; predict before any training gives what the model gives."""
    make = vector_model
    once = hvdtrain.Trainer(make, momentum(), "mse", global_batch_size=BATCH, seed=1)
    twice = hvdtrain.Trainer(make, momentum(), "mse", global_batch_size=BATCH, seed=1)
    x, y = vectors()
    before = difference([twice.predict(x)], [twice.model(x).numpy()])
    once.fit(x, y, epochs=4, verbose=0)
    twice.fit(x, y, epochs=2, verbose=0)
    twice.fit(x, y, epochs=4, initial_epoch=2, verbose=0)
    return {
        "before": before,
        "weights": difference(weights(once.model), weights(twice.model)),
    }


def case_fit_again_while_gradients_wait() -> dict[str, Any]:
    """Of 6 steps an epoch 2 wait for the update when the first fit ends, on each rank its own."""

    def accumulating() -> Any:
        return SGD(0.05, momentum=0.9, gradient_accumulation_steps=4)

    x, y = vectors()
    twice = hvdtrain.Trainer(vector_model, accumulating(), "mse", global_batch_size=BATCH, seed=1)
    twice.fit(x, y, shuffle=False, verbose=0)
    twice.fit(x, y, epochs=4, initial_epoch=1, shuffle=False, verbose=0)
    fit = {"epochs": 4}
    wanted = plain(vector_model, accumulating(), (x, y), fit, {"loss": "mse"})
    return {"weights": wanted.apart(weights(twice.model), "weights")}


def case_metric_of_each_class() -> dict[str, Any]:
    """Its result is an array."""
    found = apart(
        mixed_model,
        momentum,
        (inputs(), np.eye(5, dtype="float32")[Y]),
        compiled=lambda: {
            "loss": keras.losses.CategoricalCrossentropy(from_logits=True),
            "metrics": [keras.metrics.F1Score()],
        },
    )
    histories = found.pop("histories")
    x, y = vectors()
    single = apart(
        vector_model,
        lambda: SGD(0.003),
        (x, (y > 0).astype("float32")),
        compiled=lambda: {"loss": "mse", "metrics": [keras.metrics.F1Score(threshold=0.5)]},
    )
    one = single.pop("histories")["f1_score"][-1]
    return found | {"classes": len(histories["f1_score"][-1]), "single": single, "one": len(one)}


def case_size() -> list[int]:
    return [RANK, SIZE]
