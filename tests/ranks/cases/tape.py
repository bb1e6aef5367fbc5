"""DistributedGradientTape in a training loop of one's own, against one process with the whole batch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from references import reference
from results import Apart
from small import (
    BATCH,
    IMAGES,
    LABELS,
    LOCAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    crossentropy,
    difference,
    optimizers,
    own_part,
    small_model,
    weights,
)

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.errors import ReplicaError


def loop(distributed: bool, graph: bool, tf_variables: bool = False) -> list[np.ndarray]:
    """Train by hand with SGD and momentum, on this rank's part or on everything."""
    model = small_model()
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    compute_loss = crossentropy()
    images, labels, size = (
        (own_part(IMAGES), own_part(LABELS), LOCAL_BATCH)
        if distributed
        else (IMAGES, LABELS, BATCH)
    )

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = compute_loss(y, model(x))
        if distributed:
            tape = hvd.DistributedGradientTape(tape)
        variables = model.trainable_variables
        sources = [v.value for v in variables] if tf_variables or not distributed else variables
        optimizer.apply(tape.gradient(loss, sources), variables)

    run = tf.function(step) if graph else step
    for start in range(0, size * STEPS, size):
        x, y = images[start : start + size], labels[start : start + size]
        run(tf.constant(x), tf.constant(y))
    if distributed:
        hvd.check_replicas(model)
    return weights(model)


def case_equals_one_process() -> dict[str, Apart]:
    wanted = reference(lambda: {"weights": loop(distributed=False, graph=True)})
    return {
        f"graph {graph}, tf variables {plain}": wanted.apart(loop(True, graph, plain), "weights")
        for graph in (True, False)
        for plain in (True, False)
    }


def case_structures() -> dict[str, Any]:
    return {str(graph): structured(graph) for graph in (True, False)}


def structured(graph: bool) -> list[Any]:
    """Gradients of sources in a dict of lists, of a watched tensor, of one that the target lacks."""
    a, b = tf.Variable([1.0, 2.0]), keras.Variable([3.0])
    idle = tf.Variable(1.0)

    def step() -> Any:
        given = tf.constant([1.0, 1.0])
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(given)
            target = tf.reduce_sum(a * given) * float(RANK + 1) + b.value[0] * float(RANK)
        return tape.gradient(target, {"x": [a, b], "tensor": given, "idle": idle})

    got = (tf.function(step) if graph else step)()
    gradients = [*got["x"], got["tensor"]]
    return [*(g.numpy().tolist() for g in gradients), got["idle"] is None]


def case_persistent_and_twice() -> dict[str, Any]:
    """Several gradients of the same and of other variables in one function."""
    a, b = tf.Variable([1.0]), tf.Variable([1.0])

    @tf.function
    def step() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            one, two = a[0] * float(RANK + 1), a[0] * 10.0 * float(RANK + 1)
            three = b[0] * a[0] * 100.0 * float(RANK + 1)
        tape = hvd.DistributedGradientTape(tape)
        with hvd.DistributedGradientTape(tf.GradientTape()) as other:
            four = b[0] * 1000.0 * float(RANK + 1)
        return [
            *tape.gradient(one, [a]),
            *tape.gradient(two, [a]),
            *tape.gradient(three, [a, b]),
            *other.gradient(four, [b]),
        ]

    return {"gradients": [float(g[0]) for g in step()]}


def case_local_sources() -> dict[str, Any]:
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((None, 1))
    shared = tf.Variable([1.0])
    found = {}
    for scale in (True, False):
        with hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=layer, scale_local_gradients=scale
        ) as tape:
            target = tf.reduce_sum(layer.kernel.value + shared) * float(RANK + 1)
        local, rest = tape.get_local_and_global_gradients(target, [layer.kernel, shared])
        found[str(scale)] = [float(local[0][1][0][0]), float(rest[0][1][0])]
    return found


def case_shapes_differ_between_ranks() -> float:
    """Each rank traces another number of times."""
    w = tf.Variable(tf.ones([3, 1]))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(x @ w)
        (gradient,) = tape.gradient(loss, [w])
        w.assign_sub(0.1 * gradient)
        return gradient

    def batch(number: int, rank: int) -> np.ndarray:
        rows = 4 if rank == 0 else 1 + number % 3
        return np.random.default_rng([number, rank]).normal(size=(rows, 3)).astype("float32")

    apart = 0.0
    for number in range(5):
        got = step(tf.constant(batch(number, RANK)))
        wanted = np.mean([batch(number, rank).mean(axis=0) for rank in range(SIZE)], axis=0)
        apart = max(apart, difference([got.numpy()[:, 0]], [wanted]))
    return apart


class Taped(keras.Model):
    """A train_step of its own, as in Horovod's examples: a plain optimizer, and a tape that is distributed or not."""

    def __init__(self, tape: Any) -> None:
        super().__init__()
        self.shared, self.own = keras.layers.Dense(1), keras.layers.Dense(1)
        self.wrap = tape
        self.gradients = tf.function(self.compute_gradients, autograph=False)

    def call(self, x: Any) -> Any:
        return self.shared(x) + self.own(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        gradients, loss = self.gradients(*data)
        self.optimizer.apply(gradients, self.trainable_variables)
        tf.summary.scalar("loss", loss, self.optimizer.iterations)
        return {"loss": loss}

    def compute_gradients(self, x: Any, y: Any) -> Any:
        """Traced once, also for a model that is compiled again."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        return self.wrap(tape, self).gradient(loss, self.trainable_variables), loss


def summaries(folder: Path) -> list[int]:
    """The steps of which a train_step's own summary is in a folder of TensorBoard."""
    return [
        event.step
        for file in folder.glob("*.v2")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == "loss"
    ]


def case_in_fit() -> dict[str, Any]:
    """The same script and paths on all ranks: fit once, and again; then what must be an error, and a plain tape."""
    hvd.init()  # As every script does.
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    x = np.random.default_rng(RANK).normal(size=(8, 2)).astype("float32")

    def distributed(tape: Any, model: Any) -> Any:
        return hvd.DistributedGradientTape(tape)

    def partial(tape: Any, model: Any) -> Any:
        return hvd.PartialDistributedGradientTape(tape, local_layers=model.own)

    def plain(tape: Any, model: Any) -> Any:
        return tape

    def made(tape: Any, seed: int) -> Taped:
        keras.utils.set_random_seed(seed)
        model = Taped(tape)
        model.compile(optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        model(x)
        return model

    def fit(model: Taped, *callbacks: Any, x: Any = x, epochs: int = 2) -> Any:
        return model.fit(
            x, x[:, :1], 4, epochs, 0, list(callbacks), validation_data=(x, x[:, :1]), shuffle=False
        )

    def writers(to: Path) -> list[Any]:
        kinds = keras.callbacks
        return [
            kinds.ModelCheckpoint(to / "{epoch}.weights.h5", save_weights_only=True),
            kinds.CSVLogger(to / f"log-{RANK}.csv", append=True),
            kinds.TensorBoard(to / f"board-{RANK}", update_freq="epoch" if to == folder else 1),
            kinds.BackupAndRestore(to / "backup", delete_checkpoint=False),
        ]

    model = made(distributed, seed=RANK)
    first = fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0), *writers(folder))
    model.compile(model.optimizer, "mse", jit_compile=False)
    again = fit(model, *writers(folder), epochs=3)
    hvd.check_replicas(model)

    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: steps.append(batch)
    )
    # In the second of three batches, which only rank 1 sees; as one process would, both end there.
    bad = np.ones([12, 2], "float32")
    bad[5 if RANK else 0] = np.nan if RANK else 1.0
    ended = fit(made(distributed, 0), keras.callbacks.TerminateOnNaN(), count, x=bad).epoch

    local = made(partial, seed=0)
    local.own.kernel.assign_add([[float(RANK)], [0.0]])
    fit(local)

    def error_of(model: Taped, *callbacks: Any) -> str:
        try:
            fit(model, *callbacks)
        except ReplicaError as error:
            return str(error)
        return "no error"

    full = keras.callbacks.CSVLogger(str(folder / "missing" / "log.csv"))
    try:
        said = str(fit(made(distributed, 0), full))
    except hvdtrain.UsageError as error:
        said = str(error)
    alone = Path(tempfile.mkdtemp())
    fit(made(plain, RANK), *writers(alone), epochs=1 + RANK)
    hvd.allreduce(0.0, name="all have written")
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "epochs": [first.epoch, again.epoch],
        "log": (folder / "log-0.csv").read_text().splitlines(),
        "after nan": [steps, ended],
        "own kernel of the ranks": float(local.own.kernel[0, 0]),
        "shared kernel": float(local.shared.kernel[0, 0]),
        "other weights": error_of(made(distributed, seed=RANK)),
        "callback on rank 0": error_of(
            made(distributed, 0), *([hvd.callbacks.MetricAverageCallback()] if RANK == 0 else [])
        ),
        "no folder": said,
        "plain": sorted(path.name for path in alone.iterdir()),
        "summaries": summaries(alone / f"board-{RANK}" / "train"),
    }
