"""What the models of the kinds on keras.io have in common: how each is described, and how it is trained three ways.

Nothing in them is random but the first weights, which a seed fixes: noise comes with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvdk

BATCH = 8
EVEN = 3 * BATCH
EXAMPLES = EVEN + 3
"""The last batch is not full, and two ranks have uneven shares of it."""


@dataclass(frozen=True)
class Kit:
    """What differs between a plain script and one for several workers."""

    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer
    BatchNormalization: Any = keras.layers.BatchNormalization


@dataclass(frozen=True)
class Example:
    """A model and its data.

    Attributes:
        build: returns the compiled model.
        x, y: arrays of EXAMPLES examples, or dicts of them.
    """

    name: str
    build: Callable[[Kit], keras.Model]
    x: Any
    y: Any = None


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(seed: int, channels: int = 1, size: int = 8) -> np.ndarray:
    return rng(seed).normal(size=(EXAMPLES, size, size, channels)).astype("float32")


def vectors(seed: int, width: int) -> np.ndarray:
    return rng(seed).normal(size=(EXAMPLES, width)).astype("float32")


def classes(seed: int, count: int, *shape: int) -> np.ndarray:
    return rng(seed).integers(0, count, (EXAMPLES, *shape))


def build(example: Example, kit: Kit) -> keras.Model:
    keras.utils.set_random_seed(1)
    return example.build(kit)


def cut(data: Any, begin: int, end: int) -> Any:
    return data if data is None else keras.tree.map_structure(lambda array: array[begin:end], data)


def found(model: keras.Model) -> list[float]:
    """All weights and statistics, one after the other."""
    values = [v.numpy().ravel() for v in model.weights if "seed" not in v.path]
    return np.concatenate(values).astype(float).tolist()


def plain(example: Example) -> dict[str, list[float]]:
    """Train by plain Keras; return the weights after the full batches, and after the last one."""
    model = build(example, Kit())
    result = {}
    for name, begin, end in (("even", 0, EVEN), ("all", EVEN, EXAMPLES)):
        x, y = cut(example.x, begin, end), cut(example.y, begin, end)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        result[name] = found(model)
    return result


def by_trainer(example: Example) -> list[float]:
    """Train with the Trainer."""
    kit = Kit(BatchNormalization=hvdk.SyncBatchNormalization)
    trainer = hvdtrain.Trainer(lambda: build(example, kit), global_batch_size=BATCH, seed=1)
    trainer.fit(example.x, example.y, shuffle=False, verbose=0)
    return found(trainer.model)


def by_drop_in(example: Example) -> list[float]:
    """Train with model.fit: the plain script with its optimizers wrapped, a callback, and its part of the data."""
    model = build(example, Kit(hvdk.DistributedOptimizer, hvdk.SyncBatchNormalization))
    model.fit(
        own_part(example.x),
        own_part(example.y),
        batch_size=BATCH // hvd.size(),
        shuffle=False,
        verbose=0,
        callbacks=[hvdk.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    return found(model)


def own_part(data: Any) -> Any:
    """This rank's rows of each full batch."""

    def part(array: np.ndarray) -> np.ndarray:
        batches = array[:EVEN].reshape(EVEN // BATCH, hvd.size(), -1, *array.shape[1:])
        return batches[:, hvd.rank()].reshape(-1, *array.shape[1:])

    return data if data is None else keras.tree.map_structure(part, data)
