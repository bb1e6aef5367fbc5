"""A loop of one's own that goes on, in one process. With several ranks: tests/ranks/test_checkpoint_manager.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import CheckpointManager, UsageError
from hvdtrain.checkpoint.folder import Checkpoint, save
from hvdtrain.runtime import start_horovod

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    start_horovod()


def build(units: int = 3, accumulate: int | None = None) -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(units), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), *layers])
    optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=accumulate)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.metrics.Mean("loss")


def train(parts: tuple[Any, Any, Any], steps: range) -> list[float]:
    model, optimizer, mean = parts
    losses = []
    for _ in steps:
        with tf.GradientTape() as tape:
            noise = keras.random.normal((8, 4)) + np.random.normal(size=(8, 4)).astype("float32")
            loss = tf.reduce_mean(model(X + noise, training=True) ** 2)
        mean.update_state(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(mean.result()))
    return losses


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[Any]:
    """Makes a manager in one folder; the one before lets go of it."""
    managers: list[CheckpointManager] = []

    def make(*tracked: Any, **options: Any) -> CheckpointManager:
        for one in managers:
            one.close()
        managers.append(CheckpointManager(tmp_path / "run", *tracked, **options))
        return managers[-1]

    yield make
    for one in managers:
        one.close()


@pytest.mark.parametrize("accumulate", [None, 2])
def test_it_goes_on_bit_identically(managed: Any, accumulate: int | None) -> None:
    """Also between two updates of an optimizer that accumulates gradients."""
    first = build(accumulate=accumulate)
    manager = managed(*first)
    assert manager.restore() is None
    train(first, range(5))
    manager.save(5, epoch=1, order=np.arange(3))
    undisturbed = train(first, range(5, 9))

    again = build(accumulate=accumulate)
    train(again, range(2))
    found = managed(*again).restore()
    assert (found["step"], found["epoch"], list(found["order"])) == (5, 1, [0, 1, 2])
    assert train(again, range(5, 9)) == undisturbed
    for one, same in zip(first[0].variables, again[0].variables, strict=True):
        np.testing.assert_array_equal(one, same)


def test_the_last_ones_stay(managed: Any, tmp_path: Path) -> None:
    parts = build()
    manager = managed(*parts, keep=2)
    for step in (1, 2, 3):
        manager.save(step)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [
        "step-000000002",
        "step-000000003",
    ]
    (tmp_path / "run" / "step-000000003").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-000000003"):
        assert managed(*parts).restore() == {"step": 2}


def test_what_cannot_work(managed: Any) -> None:
    parts = build()
    manager = managed(*parts)
    CheckpointManager(manager._folder, *parts).close()  # As a notebook's cell that is run again.
    manager.save(1)
    with pytest.raises(
        UsageError,
        match=r"kernel' \(0/Sequential/4\) has shape \[4, 2\] here, \[4, 3\] in the checkpoint",
    ):
        managed(*build(units=2)).restore()
    with pytest.raises(UsageError, match=r"\d+ variables here, \d+ in the checkpoint"):
        managed(parts[0]).restore()
    with pytest.raises(UsageError, match="cannot save a int"):
        managed(parts[0], 3)
    with pytest.raises(UsageError, match="keep=1"):
        managed(*parts, keep=1)


def test_a_folder_that_another_process_has(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "file.write(sys.argv[2]); file.flush(); print(flush=True); sys.stdin.read()"
    )
    # In a container that is started again numbers and names are the same.
    owner = f"process {os.getpid()} on {socket.gethostname()} since 2026-01-02 03:04:05"
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), owner]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match=f"is in use by {owner}: choose another"):
            CheckpointManager(tmp_path, keras.Variable(1.0))
        other.stdin.close()
    CheckpointManager(tmp_path, keras.Variable(1.0)).close()


def test_variables_of_all_kinds(managed: Any) -> None:
    counter, weight = tf.Variable(3, dtype=tf.int64), keras.Variable(np.ones(2))
    manager = managed(counter, weight, tf.Module())
    manager.save(counter)
    counter.assign(5)
    weight.assign(np.zeros(2))
    assert managed(counter, weight, tf.Module()).restore() == {"step": 3}
    assert counter.numpy() == 3 and list(weight.numpy()) == [1.0, 1.0]


def test_restored_statistics_are_used(managed: Any) -> None:
    """Normalization keeps what it computes from its variables beside them."""
    x = np.array([[1.0], [3.0]], "float32")

    def adapted(data: np.ndarray) -> keras.Model:
        layer = keras.layers.Normalization()
        layer.adapt(data)
        return keras.Sequential([keras.Input((1,)), layer])

    saved, other = adapted(x), adapted(5 * x)
    managed(saved).save(1)
    managed(other).restore()
    assert other(x).numpy().ravel().tolist() == saved(x).numpy().ravel().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("step", [-1, 2.5, "two", None, np.array([1, 2])])
def test_a_step_that_is_none(managed: Any, step: Any) -> None:
    with pytest.raises(UsageError, match="pass the number of steps so far"):
        managed(tf.Variable(1.0)).save(step)


def test_newer_checkpoints_are_not_replaced_unseen(managed: Any) -> None:
    one = tf.Variable(1.0)
    managed(one).save(np.int64(100))
    with pytest.raises(UsageError, match=r"checkpoint of step 100, .* step 1 would replace: call"):
        managed(one).save(1)
    assert managed(one).restore() == {"step": 100}


def test_a_model_without_variables(managed: Any) -> None:
    with pytest.raises(UsageError, match="the Sequential has no variables yet: build it first"):
        managed(keras.Sequential([keras.layers.Dense(1)])).save(1)


def test_another_number_of_ranks(managed: Any) -> None:
    """Seeds and statistics are those of rank 0, metrics begin with nothing; gradients that wait are refused."""
    first = build(accumulate=2)
    manager = managed(*first)
    train(first, range(4))
    manager.save(4)
    again = build(accumulate=2)
    changed = managed(*again)
    read = changed._read

    def of_two() -> Any:
        position = read()
        changed._found.ranks.append(changed._found.ranks[0])
        return position

    changed._read = of_two
    assert changed.restore() == {"step": 4}
    for one, same in zip(first[0].variables, again[0].variables, strict=True):
        np.testing.assert_array_equal(one, same)
    assert float(again[2].result()) == 0.0 != float(first[2].result())

    train(first, range(1))
    managed(*first).save(5)
    changed = managed(*again)
    read = changed._read
    changed._read = of_two
    with pytest.raises(
        UsageError, match="in the middle of gradient accumulation: resume with 2 workers"
    ):
        changed.restore()


def test_checkpoints_of_a_trainer_are_refused(managed: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1, Checkpoint({"run": {}, "ranks": {}}, {}, [None]))
    with pytest.raises(UsageError, match=r"/run' are those of a Trainer: choose another folder"):
        managed(*build()[:2]).restore()
