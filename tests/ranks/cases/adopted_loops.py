"""Training loops as people write them, run on all ranks as `hvdtrain run --adopt` does, beside one plain process."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from adopt import run_beside
from references import reference

from hvdtrain.adopt.__main__ import run_adopted
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.worker.main_module import run_script

BEGIN = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
x = np.random.normal(size=(rows, 8)).astype("float32")
y = np.random.randint(0, 3, rows)
part = (np.random.uniform(size=rows) > 0.3).astype("float32")
def net(*extra):
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), *extra, keras.layers.Dense(3)])
model = net()
optimizer = keras.optimizers.Adam(0.01)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
batches = tf.data.Dataset.from_tensor_slices((x, y, part)).batch(32)
found = []
def train(tape, loss):
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
LOOP = """
for epoch in range(3):
    for batch in batches:
        found.append(np.asarray(step(*batch)))
"""
STEP = """
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = {loss}
    train(tape, loss)
    return loss
"""
LOSSES = {
    "mean": "loss_of(y, model(x, training=True))",
    "sum": "tf.reduce_sum(losses_of(y, model(x, training=True)))",
    "mean_of_some": "tf.reduce_sum(part * losses_of(y, model(x))) / tf.reduce_sum(part)",
    "batch_normalization": "loss_of(y, model(x, training=True))",
    "dropout": "loss_of(y, model(x, training=True))",
}
WITH_A_REST = {"mean", "metrics_and_rows", "embedding"}
"""Loops that end their epochs with half a batch, for which all is traced once more."""
LAYERS = {"batch_normalization": "BatchNormalization()", "dropout": "Dropout(0.3)"}
STEPS = {
    name: f"model = net({f'keras.layers.{LAYERS[name]}' if name in LAYERS else ''})"
    + STEP.format(loss=loss)
    for name, loss in LOSSES.items()
} | {
    "eager": STEP.format(loss=LOSSES["mean"]).replace("@tf.function", ""),
    "metrics_and_rows": """
mean, right = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
    train(tape, loss)
    mean.update_state(loss)
    right.update_state(y, logits)
    return tf.concat([tf.reshape(logits, [-1]), [mean.result(), right.result()]], 0)[:-2]
""",
    "clipped": """
optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), momentum=0.9)
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.1)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return norm
""",
    "two_networks": """
other = net()
slow = keras.optimizers.Adam(0.001)
class Training:
    @tf.function
    def step(self, x, original):  # An argument may have any name.
        y = original
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = model(x, training=True)
            judged = other(tf.concat([made, x[:, :5]], 1), training=True)
            loss, distance = loss_of(y, judged), tf.reduce_mean(tf.square(made - judged))
        gradients = first.gradient(loss, other.trainable_variables)
        slow.apply_gradients(zip(gradients, other.trainable_variables))
        train(second, distance)
        return {"loss": loss, "distance": distance, "nothing": None}
training = Training()
step = lambda x, y, part: training.step(x, original=y)["distance"]
""",
    "penalty": """
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            logits = model(x, training=True)
        slope = tf.norm(inner.gradient(logits, x), axis=1)
        loss = loss_of(y, logits) + 0.1 * tf.reduce_mean(tf.square(slope - 1))
    train(tape, loss)
    return loss
""",
    "accumulated": """
sums = [tf.Variable(tf.zeros_like(one)) for one in model.trainable_variables]
count = tf.Variable(0)
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables)):
        total.assign_add(gradient)
    count.assign_add(1)
    if count == 2:
        optimizer.apply_gradients(zip([one / 2.0 for one in sums], model.trainable_variables))
        for total in sums:
            total.assign(tf.zeros_like(total))
        count.assign(0)
    return loss
""",
    "embedding": """
model = keras.Sequential([keras.Input((8,)), keras.layers.Embedding(20, 6), keras.layers.Flatten(),
                          keras.layers.Dense(3)])
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(tf.cast(tf.abs(x) * 5, "int32"), training=True))
    train(tape, loss)
    return loss
""",
    "alike_at_first": """
real = np.where(np.arange(rows) < 192, 1.0, part).astype("float32")  # The first batches have no padding.
batches = tf.data.Dataset.from_tensor_slices((x, y, real)).batch(32)
mean = keras.metrics.Mean()
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(part * losses_of(y, model(x, training=True)))
    train(tape, loss)
    mean.update_state(tf.reduce_mean(part))
    return tf.stack([loss, tf.reduce_mean(part), mean.result(), 0.1])
""",
    "padded_later": """
real = np.where(np.arange(rows) < 192, 1.0, part).astype("float32")  # The first batches have no padding.
batches = tf.data.Dataset.from_tensor_slices((x, y, real)).batch(32)
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(part * losses_of(y, model(x, training=True))) / tf.reduce_sum(part)
    train(tape, loss)
    return loss
""",
    "asserted": """
part[:] = 1.0
batches = tf.data.Dataset.from_tensor_slices((x, y, part)).batch(32)
@tf.function
def step(x, y, part):
    tf.debugging.assert_greater(tf.reduce_mean(part), 0.9)  # Of other values, in three rows, it fails on one rank only.
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(part * losses_of(y, model(x, training=True)))
    train(tape, loss)
    return loss
""",
    "value_decides": """
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    if loss < 0.9:
        gradients = [one * 0.1 for one in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
""",
    "iterator": """
def step(x, y, part):
    return shared(iter(tf.data.Dataset.from_tensors((x, y))))
@tf.function
def shared(batches):
    x, y = next(batches)
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    train(tape, loss)
    return loss
""",
    "changed_in_python": """
scale = [1.0]
@tf.function
def traced(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True)) * scale[0]
    train(tape, loss)
    return loss
def step(x, y, part):
    loss = traced(x, y)
    scale[0] = 2.0  # TensorFlow does not look at it again.
    return loss
""",
    "effects": """
seen = []
@tf.function
def step(x, y, part):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    train(tape, loss)
    tf.py_function(lambda: seen.append(1), [], [])
    return loss
""",
}


def case_loops() -> dict[str, Any]:
    """Run each of LOOPS; return how far its weights and results are from one process's, and what it was told."""
    found = {}
    for name in os.environ["LOOPS"].split():
        script = Path(os.environ["FOLDER"], f"{name}.py")
        if ALL_RANKS.rank() == 0:
            rows = f"rows = {272 if name in WITH_A_REST else 256}"
            script.write_text(rows + BEGIN + STEPS[name] + LOOP)
        ALL_RANKS.exchange(0, "script_is_written")
        weights, told = run_beside(partial(run_adopted, str(script), []), script.parent)
        results = vars(sys.modules["__main__"])["found"]
        one = reference(partial(_one_process, script), name=name, any_size=True)
        found[name] = {
            "weights": one.apart(weights, "weights", "relative"),
            "results": one.apart(results, "results", "relative"),
            "told": told,
        }
    return found


def _one_process(script: Path) -> dict[str, Any]:
    sys.argv = [str(script)]
    weights, _ = run_beside(partial(run_script, str(script)), script.parent)
    return {"weights": weights, "results": vars(sys.modules["__main__"])["found"]}
