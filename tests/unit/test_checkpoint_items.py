"""Nothing in a checkpoint is idle: whatever is changed in it, the training that goes on from it ends otherwise."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

from hvdtrain import Checkpoints, Trainer
from hvdtrain.checkpoint.background_write import BackgroundWrite
from hvdtrain.checkpoint.folder import Checkpoint, newest, save

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
OF_OTHER_RANKS = ("metrics", "untracked", "rules", "merged_with", "weighted")
"""Of what each rank has of its own, what counts only on another number of ranks."""
ALSO_OWN = ("moving_mean", "moving_variance", "gradient_accumulator", "seed_generator_state")
"""Variables of which the same ranks take what each had of its own."""
IDLE = (("process", "seen"), ("random", 0))
"""What counts only with data that is read in order, and the version of Python's generator."""


EVERY = 1 if "HVDTRAIN_ALL_CASES" in os.environ else 6
"""All of them before a release: a minute and a half."""


class Ended(Exception):
    pass


class Noise(keras.callbacks.Callback):
    """Draws from every generator of the process, and ends the training after some steps."""

    def __init__(self, end: int | None = None) -> None:
        super().__init__()
        self.steps = 0
        self.end = end

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        drawn = random.random() + abs(np.random.normal()) + float(keras.random.uniform(()))
        # Each draw counts, also in a step without an update.
        rate = float(self.model.optimizer.learning_rate)
        self.model.optimizer.learning_rate = 0.5 * rate + 0.02 * drawn
        self.steps += 1
        if self.steps == self.end:
            raise Ended


def train(folder: Path, end: int | None = None) -> dict[str, Any]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)

    def build() -> keras.Model:
        layers = [keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), *layers])

    trainer = Trainer(
        build,
        keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2),
        "mse",
        ["mae"],
        global_batch_size=8,
        run_dir=folder,
        checkpoints=Checkpoints(every_steps=3),
        probe=False,
        run_eagerly=True,
    )
    stop = keras.callbacks.EarlyStopping("loss", patience=20)
    noise = Noise(end)
    history = trainer.fit(X, X[:, :1], epochs=3, callbacks=[stop, noise], verbose=0)
    return {
        "weights": [v.numpy().tolist() for v in trainer.model.variables],
        "optimizer": [v.numpy().tolist() for v in trainer.model.optimizer.variables],
        "history": history.history,
        "epochs": history.epoch,
        "callbacks": [stop.wait, stop.best, noise.steps],
        "random": [random.random(), np.random.random(), float(keras.random.uniform(()))],
    }


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after ten steps of 18; its newest checkpoint is of the ninth, within the second epoch."""
    folder = tmp_path_factory.mktemp("ended")
    # Each is waited for, and none left out because the one before takes long.
    with mock.patch.object(BackgroundWrite, "has_ended", True), pytest.raises(Ended):
        train(folder, end=10)
    return folder


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers and arrays in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, (*path, key))
    elif isinstance(value, list | tuple) and not all(isinstance(one, int) for one in value):
        for index, one in enumerate(value):
            yield from leaves(one, (*path, index))
    elif value is not None and not isinstance(value, str):
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` with another number at `path`."""
    if path:
        first, *rest = path
        inner = changed(value[first], tuple(rest))
        if isinstance(value, tuple):
            return (*value[:first], inner, *value[first + 1 :])
        found = copy.copy(value)
        found[first] = inner
        return found
    if isinstance(value, bool):
        return not value
    if isinstance(value, list | tuple):
        # The position in a generator's state.
        return type(value)([*value[:-1], value[-1] ^ 1])
    if isinstance(value, np.ndarray):
        return value - np.asarray(1, value.dtype)
    return value ^ 1 if isinstance(value, int) else value - 10


@pytest.mark.slow
def test_whatever_is_changed_counts(ended: Path, tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed")
    found = newest(ended / "checkpoints")
    assert found is not None and found.facts["position"]["steps"] == 9
    idle: list[Any] = []

    def resumed(content: Checkpoint) -> Any:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(ended, run)
        save(run / "checkpoints", 9, content)
        try:
            return train(run)
        except Exception as error:  # A change that is noticed counts as well.
            return error

    assert resumed(found) == undisturbed
    alone = found.ranks[0]
    items: list[tuple[Any, Checkpoint]] = [
        (name, replace(found, arrays={**found.arrays, name: changed(array, ())}))
        for name, array in found.arrays.items()
        if not name.endswith(ALSO_OWN)
    ]
    items += [
        (path, replace(found, ranks=[changed(alone, path)]))
        for path in leaves(alone)
        if path[0] not in OF_OTHER_RANKS and path not in IDLE
    ]
    assert len(items) > 40
    for name, content in items[::EVERY]:
        if resumed(content) == undisturbed:
            idle.append(name)
    assert idle == []
