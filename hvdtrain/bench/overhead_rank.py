"""One rank of a timing: epochs of Keras's `fit` and of the Trainer, in turn.

Started by overhead.py. Each rank takes the core of its local rank, one thread. Rank 0 reports
{"milliseconds": [[of a step of fit, of a step of the Trainer] for each pass]}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.bench.core import take_core
from hvdtrain.bench.models import MODELS
from hvdtrain.bench.overhead import DATA
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.keras import DistributedOptimizer, broadcast_variables
from hvdtrain.runtime import Rank, init

SECONDS = 1.0
"""Aim of one epoch."""

EPOCHS = 2
"""Timed in each pass, after one that is not."""

SHUFFLED = 1024
"""Examples in a Dataset's shuffle buffer."""


class Clock(keras.callbacks.Callback):
    """Notes when each epoch begins and training ends. It looks at no step, which the Trainer would have to serve."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self.times.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self.times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", choices=DATA, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="examples a rank")
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True, help="file for rank 0's report")
    arguments = parser.parse_args()
    me = init()
    take_core(me.local_rank)
    fit = keras_fit(me, arguments.model, arguments.data, arguments.batch_size)
    train = trainer_fit(me, arguments.model, arguments.data, arguments.batch_size)
    train(10)
    mine = round(SECONDS / fit(10))
    steps = int(ALL_RANKS.broadcast(np.clip(mine, 5, 300), 0, "hvdtrain_bench_steps"))
    found = [[1e3 * fit(steps), 1e3 * train(steps)] for _ in range(arguments.passes)]
    if me.is_first:
        arguments.report.write_text(json.dumps({"milliseconds": found}))


def keras_fit(me: Rank, name: str, kind: str, batch_size: int) -> Callable[[int], float]:
    """Return what trains by Keras's `fit`, on this rank's part of the data, and returns the seconds of a step."""
    model = MODELS[name]()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if me.size > 1:
        optimizer = DistributedOptimizer(optimizer)
        broadcast_variables(model.variables)
    model.compile(optimizer, _loss(), jit_compile=False)

    def seconds(steps: int) -> float:
        given = _given(kind, examples(model, batch_size * steps, seed=me.rank), batch_size)
        if kind == "arrays":
            given["batch_size"] = batch_size
        return _timed(model.fit, given, steps)

    return seconds


def trainer_fit(me: Rank, name: str, kind: str, batch_size: int) -> Callable[[int], float]:
    """Return what trains by the Trainer, which divides the data itself, and returns the seconds of a step."""
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    global_batch_size = batch_size * me.size
    trainer = hvdtrain.Trainer(
        MODELS[name](), optimizer, _loss(), global_batch_size=global_batch_size, jit_compile=False
    )

    def seconds(steps: int) -> float:
        data = examples(trainer.model, global_batch_size * steps, seed=0)
        return _timed(trainer.fit, _given(kind, data, global_batch_size), steps)

    return seconds


def examples(model: keras.Model, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` random examples: x float32 in the model's input shape, y int64 of 10 classes."""
    random = np.random.default_rng(seed)
    x = random.random((count, *model.input_shape[1:]), "float32")
    return x, random.integers(0, 10, count)


def dataset(data: tuple[np.ndarray, np.ndarray], batch_size: int) -> tf.data.Dataset:
    """Return the shuffled batches that a tutorial would make of `data`."""
    examples = tf.data.Dataset.from_tensor_slices(data)
    return examples.shuffle(SHUFFLED, seed=1).batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _given(kind: str, data: tuple[np.ndarray, np.ndarray], batch_size: int) -> dict[str, Any]:
    """Return `data` as arguments of fit."""
    if kind == "dataset":
        return {"x": dataset(data, batch_size)}
    return {"x": data[0], "y": data[1]}


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _timed(fit: Callable[..., Any], data: dict[str, Any], steps: int) -> float:
    clock = Clock()
    fit(**data, epochs=1 + EPOCHS, verbose=0, callbacks=[clock])
    return (clock.times[-1] - clock.times[1]) / (EPOCHS * steps)


if __name__ == "__main__":
    main()
