"""One worker of an elastic Keras training is killed; both go on from the last commit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from launch import ROOT, program, run_command

from hvdtrain.errors import UsageError
from hvdtrain.keras import elastic
from hvdtrain.keras.elastic import KerasState, run
from hvdtrain.runtime import start_horovod

STEPS = 4  # 64 examples, 2 workers, batches of 8


@pytest.mark.slow
def test_a_killed_worker(tmp_path: Path) -> None:
    events = tmp_path / "events"
    command = [program("hvdtrain"), "run", "-np", "2", "--min-np", "1", "--controller", "gloo"]
    command += ["--log-dir", str(tmp_path / "logs")]
    script = ROOT / "tests" / "ranks" / "elastic_training.py"
    ended = run_command([*command, str(script), str(events)], timeout=120)
    assert ended.returncode == 0, ended.output
    found: list[dict[str, Any]] = [json.loads(line) for line in events.read_text().splitlines()]
    starts = [event for event in found if event["what"] == "trains" and event["epoch"] == 0]
    assert len(starts) == 2, ended.output
    assert starts[0]["bits"] == starts[1]["bits"]
    (dead,) = (event["pid"] for event in found if event["what"] == "dies")
    again = [event for event in found if event["what"] == "trains" and event["epoch"] == 2]
    # The step before the first sync, two epochs, and the step after the reset.
    assert [(one["size"], one["iterations"]) for one in again] == [(2, 2 * STEPS + 2)] * 2
    assert again[0]["bits"] == again[1]["bits"]
    # The one that lived is rank 0, and gives its state to the new one.
    old, new = sorted(again, key=lambda one: one["rank"])
    assert old["pid"] in {one["pid"] for one in starts} - {dead}
    assert new["pid"] not in {one["pid"] for one in starts}
    # From there `hvdtrain ps` and the watchdog have it.
    assert [one["heartbeat"] for one in (old, new)] == [0, 1]
    for number in range(2):
        log = (tmp_path / "logs" / f"rank.{number}" / "stdout").read_text()
        assert f"epoch 2 on rank {number}\n" in log
        assert f"rank {1 - number}\n" not in log
    ends = [event for event in found if event["what"] == "finished"]
    assert [(e["size"], e["epoch"], e["iterations"]) for e in ends] == [(2, 6, 6 * STEPS + 2)] * 2


class Attempts:
    """A state that only counts."""

    restored = 0

    def restore(self) -> None:
        self.restored += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_only_horovods_errors_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.keras.elastic._reset", lambda: None)
    monkeypatch.setattr("horovod.common.elastic.notification_manager", Attempts())
    errors = [
        tf.errors.UnknownError(None, None, "Horovod has been shut down."),
        tf.errors.UnknownError(None, None, "{{node hvdtrain_gradient_0_1}} Connection reset"),
        HorovodInternalError("gone"),
    ]
    state = Attempts()

    @run
    def train(state: Attempts) -> str:
        if errors:
            raise errors.pop()
        return "finished"

    assert train(state) == "finished"
    assert state.restored == 3
    errors.append(tf.errors.UnknownError(None, None, "disk is full"))
    with pytest.raises(tf.errors.UnknownError, match="disk is full"):
        train(state)


class Counted(keras.callbacks.Callback):
    """Counts the steps that are kept; a failure in step 20 loses what was done since the last commit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.failed = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.steps += 1
        if self.state.steps == 20 and not self.failed:
            self.failed = True
            raise HorovodInternalError("a rank was killed")


class Kept(SimpleNamespace):
    """A state without ranks."""

    def commit(self) -> None:
        self.kept = {name: getattr(self, name) for name in ("batch", "epoch", "steps")}


def test_no_batch_is_trained_twice_after_a_failure_in_an_epoch() -> None:
    steps, epochs = 8, 4
    state = Kept(batch=0, epoch=0, steps=0)
    counted = Counted(state)
    callbacks = [
        counted,
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
        elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensors((np.ones((1, 1)), np.ones((1, 1)))).repeat()

    def train() -> None:
        settings: dict[str, Any] = {"callbacks": callbacks, "verbose": 0}
        if state.batch:
            model.fit(data, steps_per_epoch=steps - state.batch, epochs=1, **settings)
        model.fit(data, steps_per_epoch=steps, epochs=epochs - state.epoch, **settings)

    with pytest.raises(HorovodInternalError):
        train()
    vars(state).update(state.kept)
    assert (state.epoch, state.batch, state.steps) == (2, 2, 18)
    train()
    assert (state.epoch, state.batch, state.steps) == (epochs, 0, steps * epochs)


def test_save_and_restore() -> None:
    class Own(keras.Sequential):
        """With a train_step of its own, which may use other optimizers than that of compile."""

        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    model = Own([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    state = KerasState(model, batch=3)
    before = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    model.fit(np.ones((1, 2)), np.ones((1, 1)), verbose=0)
    state.batch = 7
    state.restore()
    after = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert state.batch == 3
    start_horovod()
    state.batch = 7
    state.commit()  # Horovod itself sends something then.
    state.restore()
    assert state.batch == 7
    model.d_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    with pytest.raises(UsageError, match="build the optimizer '"):
        KerasState(model)
    model.d_optimizer.build(model.trainable_variables)
    state = KerasState(model)
    model.d_optimizer.iterations.assign(5)
    state.restore()
    assert int(model.d_optimizer.iterations) == 0
    with pytest.raises(UsageError, match="build the model first"):
        KerasState(keras.Sequential([keras.layers.Dense(1)]))
