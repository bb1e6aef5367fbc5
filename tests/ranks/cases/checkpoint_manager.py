"""A loop of one's own on several ranks, restored: see test_checkpoint_manager.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import CheckpointManager
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.keras_internals.variables import seed_variables
from hvdtrain.parallel import ShardedOptimizer

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def _parts(sharded: bool) -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), *layers])
    fold_rank_into_seeds(seed_variables(model), hvd.rank())
    if sharded:
        optimizer = ShardedOptimizer(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2))
    else:
        adam = keras.optimizers.Adam(0.1)
        optimizer = hvd.DistributedOptimizer(adam, backward_passes_per_step=2)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.metrics.Mean("loss")


def _train(parts: tuple[Any, Any, Any], steps: int) -> list[float]:
    model, optimizer, mean = parts
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X[hvd.rank() :: hvd.size()], training=True) ** 2)
        mean.update_state(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(mean.result()))
    return losses


def _folder() -> Path:
    return Path(ALL_RANKS.exchange(tempfile.mkdtemp(), "folder")[0])


def _goes_on(sharded: bool) -> dict[str, Any]:
    """Saved between two updates; each rank goes on with its own losses, masks and gradients that wait."""
    folder = _folder()
    first = _parts(sharded)
    manager = CheckpointManager(folder, *first)
    _train(first, 3)
    manager.save(3)
    undisturbed = _train(first, 4)
    manager.close()

    again = _parts(sharded)
    _train(again, 2)
    manager = CheckpointManager(folder, *again)
    found = manager.restore()
    resumed = _train(again, 4)
    manager.close()
    different = [
        a.path
        for a, b in zip(first[0].variables, again[0].variables, strict=True)
        if not np.array_equal(a, b)
    ]
    return {"found": found, "losses": [undisturbed, resumed], "different": different}


def case_goes_on() -> dict[str, Any]:
    return _goes_on(sharded=False)


def case_goes_on_sharded() -> dict[str, Any]:
    return _goes_on(sharded=True)


def _plain_parts() -> tuple[Any, Any]:
    """Whose training is the same on any number of ranks; the shapes cannot be divided evenly."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = ShardedOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build(model.trainable_variables)
    return model, optimizer


def case_saved_by_two() -> tuple[str, list[np.ndarray]]:
    """Returns the folder of a checkpoint after step 2, and the weights after step 4."""
    folder = _folder()
    parts = (*_plain_parts(), keras.metrics.Mean("loss"))
    manager = CheckpointManager(folder, *parts[:2])
    _train(parts, 2)
    manager.save(2)
    manager.close()
    _train(parts, 2)
    return str(folder), [variable.numpy() for variable in parts[0].variables]


def case_resumed_by_one() -> list[np.ndarray]:
    """Returns the weights after step 4."""
    parts = (*_plain_parts(), keras.metrics.Mean("loss"))
    manager = CheckpointManager(os.environ["SAVED_BY_TWO"], *parts[:2])
    assert manager.restore() == {"step": 2}
    _train(parts, 2)
    manager.close()
    return [variable.numpy() for variable in parts[0].variables]
