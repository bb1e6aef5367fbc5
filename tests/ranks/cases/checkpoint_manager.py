"""A loop of one's own on several ranks, restored: see test_checkpoint_manager.py."""

from __future__ import annotations

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

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def _parts() -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), *layers])
    fold_rank_into_seeds(model, hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), backward_passes_per_step=2)
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


def case_goes_on() -> dict[str, Any]:
    """Saved between two updates; each rank goes on with its own losses, masks and gradients that wait."""
    folder = Path(ALL_RANKS.exchange(tempfile.mkdtemp(), "folder")[0])
    first = _parts()
    manager = CheckpointManager(folder, *first)
    _train(first, 3)
    manager.save(3)
    undisturbed = _train(first, 4)
    manager.close()

    again = _parts()
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
