"""Scripts of jobs with parameter servers.

`equal` is compared with one process, and loses its worker in the middle of a step; `faults` loses processes at any
moment; `scripts` runs the project's own.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.remote_variables import tf_variables
from hvdtrain.strategies.parameter_server import ParameterServer

ROWS, BATCH, WORDS = 150, 32, 40
FAULT_ROWS, FAULT_BATCH, FAULT_EPOCHS = 1608, 16, 3
LEFT = 5
"""Exit code of `equal`."""
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


class Count(keras.metrics.Metric):
    """The number of examples."""

    def __init__(self, name: str = "count", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.examples = self.add_variable((), "zeros", name="examples")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.examples.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.examples.value


class OwnStep(keras.Model):
    """A train_step of the user's, with a counter of its own and another name in the logs."""

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"own loss": loss}


def build(kind: type[keras.Model] = keras.Model) -> keras.Model:
    """Embedding, Dense, BatchNormalization, dropout, a penalty, a constraint and a tied table."""
    numbers, words = layers.Input((6,)), layers.Input((3,), dtype="int32")
    table = layers.Embedding(WORDS, 4)
    hidden = layers.Dense(12, activation="relu", kernel_regularizer="l2")(numbers)
    hidden = layers.Dropout(0.2, seed=3)(layers.BatchNormalization()(hidden))
    both = layers.Concatenate()([hidden, layers.Flatten()(table(words))])
    constraint = keras.constraints.MaxNorm(1.0)
    return kind([numbers, words], layers.Dense(2, kernel_constraint=constraint)(both))


def data() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    return [x, rng.integers(0, WORDS, (ROWS, 3))], y, rng.uniform(0.5, 2, ROWS).astype("float32")


def rate() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.9)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.AdamW(rate(), weight_decay=0.05, global_clipnorm=0.5),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.3),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
}


def trained(optimizer: Any, strategy: Any, folder: Path | None, kind: Any = keras.Model) -> Any:
    """Train, evaluate, predict and save; return what can be compared."""
    keras.backend.clear_session()
    x, y, weight = data()
    trainer = hvdtrain.Trainer(
        lambda: build(kind),
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
        global_batch_size=BATCH,
        strategy=strategy,
        seed=1,
    )
    history = trainer.fit(x, y, weight, epochs=2, validation_data=(x, y), verbose=0)
    model = trainer.model
    evaluation = trainer.evaluate(x, y, verbose=0)
    outputs = trainer.predict(x)
    if folder is not None:
        trainer.save(folder / "model.keras")
        np.save(folder / "outputs.npy", outputs)
    names = sorted(history.history)
    return {
        "compared": ["weights", "outputs", "state", "history", "evaluation"],
        "weights": model.get_weights(),
        "outputs": [outputs],
        "state": [v.numpy() for v in model.optimizer.variables],
        "history": [history.history[name] for name in names],
        "evaluation": evaluation,
        "names": names,
        "iterations": int(model.optimizer.iterations),
        "devices": {v.path: [p.device for p in tf_variables(v)] for v in model.variables},
    }


def difference(one: Any, other: Any) -> float:
    pairs = zip(one, other, strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b, dtype="float64")))) for a, b in pairs)


def equal(folder: Path) -> None:
    """One worker, one step at a time: the same numbers as one process. What is refused."""
    early = keras.Variable(1.0)  # TensorFlow is in use before the process joins the job.
    strategy = ParameterServer(in_flight=1, min_part_bytes=64)
    found: dict[str, Any] = {"refused": refused(strategy)}
    early.assign_add(1.0)
    early.assign(early * 3)
    found["early"] = float(early)
    for name, make in OPTIMIZERS.items():
        kind = OwnStep if name == "sgd" else keras.Model
        servers = trained(make(), strategy, folder if name == "adam" else None, kind)
        alone = trained(make(), "horovod", None, kind)
        found[name] = {
            "differences": {key: difference(servers[key], alone[key]) for key in alone["compared"]},
            "names": [servers["names"], alone["names"]],
            "iterations": servers["iterations"],
            "devices": servers["devices"],
        }
    found["loading"] = loading(strategy, folder)
    print("EQUAL", flush=True)
    servers, alone = interrupted(strategy, folder), interrupted("horovod", folder)
    found["interrupted"] = {
        "difference": difference(servers["state"], alone["state"]),
        "count": servers["count"],
    }
    (folder / "found.json").write_text(json.dumps(found))
    print("LEAVING", flush=True)
    end = time.monotonic() + 60
    while not (folder / "leave").exists() and time.monotonic() < end:
        time.sleep(0.05)
    sys.exit(LEFT)


def refused(strategy: ParameterServer) -> dict[str, str]:
    x, y, _ = data()
    wrong: dict[str, dict[str, Any]] = {
        "gradient_accumulation_steps": {
            "optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)
        },
        "run_eagerly": {"run_eagerly": True},
        "jit_compile": {"jit_compile": True},
        "loss_scale_factor": {
            "optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        },
    }
    messages = {}
    for name, arguments in wrong.items():
        given = {"optimizer": "sgd", "loss": "mse", "global_batch_size": 8} | arguments
        try:
            hvdtrain.Trainer(build, strategy=strategy, **given).fit(x, y, verbose=0)
        except UsageError as error:
            messages[name] = str(error)
    return messages


def loading(strategy: ParameterServer, folder: Path) -> dict[str, Any]:
    """Trainers that load what one of them saved, before and after they have trained; all go on alike."""
    keras.backend.clear_session()
    (x, _), y, _ = data()

    def trainer() -> hvdtrain.Trainer:
        parts = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(2)]
        return hvdtrain.Trainer(
            lambda: keras.Sequential([layers.Input((6,)), *parts]),
            keras.optimizers.AdamW(rate(), weight_decay=0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            global_batch_size=BATCH,
            strategy=strategy,
            seed=1,
        )

    def state(one: hvdtrain.Trainer) -> list[np.ndarray]:
        return [v.numpy() for v in [*one.model.weights, *one.model.optimizer.variables]]

    def trained_on(one: hvdtrain.Trainer) -> list[np.ndarray]:
        one.fit(x, y, epochs=3, initial_epoch=2, verbose=0)
        return state(one)

    one, other = trainer(), trainer()
    one.fit(x, y, epochs=2, verbose=0)
    one.save(folder / "middle.keras")
    saved, expected = state(one), trained_on(one)
    found: dict[str, Any] = {"moved": difference(saved, expected)}
    for name, each in (("after fit", one), ("before fit", other)):
        each.load(folder / "middle.keras")
        found[name] = {
            "loaded": difference(state(each), saved),
            "trained on": difference(trained_on(each), expected),
            "iterations": int(each.model.optimizer.iterations),
            "devices": len({p.device for v in each.model.weights for p in tf_variables(v)}),
        }
    return found


def pass_gate(token: tf.Tensor, folder: Path, name: str) -> tf.Tensor:
    """Return `token` once there is a file NAME.go; NAME.begun tells that somebody waits for it."""
    path = str(folder / f"{name}.go")

    def closed(turn: tf.Tensor) -> tf.Tensor:
        # A constant path would be looked up once, before the loop.
        same = tf.strings.substr(path + tf.strings.as_string(turn), 0, len(path))
        return tf.size(tf.io.matching_files(same)) == 0

    with tf.control_dependencies([token]):
        begun = tf.io.write_file(str(folder / f"{name}.begun"), "")
    with tf.control_dependencies([begun]):
        last = tf.while_loop(closed, lambda turn: (turn + 1,), [tf.zeros([], tf.int64)])
    with tf.control_dependencies(tf.nest.flatten(last)):
        return tf.identity(token)


class GatedLayer(layers.Layer):
    """Its gradient waits: the layers above have theirs by then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def same(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda upstream: pass_gate(
                upstream, Path(self._folder), "gradient"
            )

        return same(inputs)


class GatedModel(keras.Sequential):
    """Its step waits once it has updated the weights."""

    folder = Path()

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        token = keras.ops.sum(self.layers[-1].kernel)
        return logs | {"loss": logs["loss"] + 0 * pass_gate(token, self.folder, "applied")}


def interrupted(strategy: Any, folder: Path) -> dict[str, Any]:
    """One step, of which the worker dies before its last gradient, and after it has updated the weights."""
    keras.backend.clear_session()
    GatedModel.folder = folder
    (x, _), y, _ = data()

    def build() -> keras.Model:
        below = [layers.Dense(8), layers.BatchNormalization(), GatedLayer(folder)]
        return GatedModel([layers.Input((6,)), *below, layers.Dense(4), layers.Dense(2)])

    trainer = hvdtrain.Trainer(
        build,
        keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        [Count()],
        global_batch_size=BATCH,
        strategy=strategy,
        seed=1,
    )
    history = trainer.fit(x[:BATCH], y[:BATCH], epochs=1, verbose=0).history
    model = trainer.model
    return {
        "state": [v.numpy() for v in [*model.weights, *model.optimizer.variables]],
        "count": history["count"],
    }


class Say(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        print(f"BEGIN {epoch}", flush=True)


def faults(folder: Path) -> None:
    """Two fits: a worker is lost in the first one, a server in the second."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(FAULT_ROWS, 16)).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    save = keras.callbacks.ModelCheckpoint(folder / "saved.keras")
    for run, epochs in (("first", FAULT_EPOCHS), ("second", 1000)):
        print(f"FIT {run}", flush=True)
        trainer = hvdtrain.Trainer(
            lambda: keras.Sequential([layers.Input((16,)), layers.Dense(32), layers.Dense(2)]),
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[Count()],
            global_batch_size=FAULT_BATCH,
            run_dir=folder / run,
        )
        history = trainer.fit(x, y, epochs=epochs, callbacks=[Say(), save], verbose=2).history
        found = {"history": history, "iterations": int(trainer.model.optimizer.iterations)}
        (folder / "found.json").write_text(json.dumps(found))


def scripts(folder: Path) -> None:
    """Scripts of the project, unchanged, one after the other in one job."""
    digits = ["train_mnist.py", "--epochs", "30", "--run-dir", str(folder / "run")]
    table = ["train_tabular.py", "--rows", "131072", "--batch-size", "512", "--epochs", "3"]
    for script, *arguments in (digits, table):
        sys.argv = [script, *arguments]
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")


if __name__ == "__main__":
    {"equal": equal, "faults": faults, "scripts": scripts}[sys.argv[1]](Path(sys.argv[2]))
