"""A Trainer whose newest checkpoint is damaged goes on from the one before, says so, and ends with the same weights."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import Checkpoints, Trainer, UsageError

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
SCHEDULE = Checkpoints(every_steps=2)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def unreadable(path: Path) -> None:
    """As root one may read any file, but no folder."""
    path.unlink()
    path.mkdir()


def train(
    folder: Path,
    checkpoints: Checkpoints = SCHEDULE,
    epochs: int = 2,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Return the weights and the History, as a new process would have them, with its names and the same seed."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    trainer = Trainer(
        lambda: keras.Sequential([keras.Input((3,)), *layers]),
        keras.optimizers.Adam(0.1),
        "mse",
        global_batch_size=8,
        run_dir=folder,
        checkpoints=checkpoints,
        probe=False,
    )
    history = trainer.fit(X, X[:, :1], epochs=epochs, verbose=0, callbacks=list(callbacks))
    return trainer.model.get_weights(), history.history


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, Any]]:
    """A run with two checkpoints: of its last step, 8, and of one before, whichever there was time to save."""
    folder = tmp_path_factory.mktemp("finished")
    weights, history = train(folder)
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert len(names) == 2 and names[-1] == "step-000000008"
    return folder, weights, history


@pytest.mark.parametrize(
    "damage", [emptied, truncated, flipped, longer, unreadable], ids=lambda one: one.__name__
)
def test_the_one_before_is_taken(
    finished: tuple[Path, list[Any], dict[str, Any]],
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    whole, weights, history = finished
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    damage(run / "checkpoints" / "step-000000008")
    with pytest.warns(UserWarning, match="step-000000008.* is damaged"):
        again, found = train(run)
    assert found == history
    for one, same in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, same)


def test_all_are_damaged(finished: tuple[Path, list[Any], dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    for checkpoint in run.glob("checkpoints/step-*"):
        flipped(checkpoint)
    with (
        pytest.warns(UserWarning, match="step-00000000[2468]"),
        pytest.raises(UsageError, match="all checkpoints are damaged"),
    ):
        train(run)


class Between(keras.callbacks.Callback):
    """Does something after the first epoch, of which a resumed run needs to know nothing."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.get_state, self.set_state = (lambda: None), (lambda state: None)
        self._work = work

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self._work()


def test_a_folder_that_was_removed_holds_what_comes_after(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def remove() -> None:
        while run.exists():  # A checkpoint may be written meanwhile.
            shutil.rmtree(run, ignore_errors=True)

    train(run, Checkpoints(), 3, [Between(remove)])
    lines = (run / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "2", "3"]
    assert (run / "model.keras").exists() and list(run.glob("checkpoints/step-*"))


def test_a_folder_that_is_another_runs_by_now_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        while not list(run.glob("checkpoints/step-*")):  # It may be written still.
            time.sleep(0.01)
        run.rename(tmp_path / "moved")
        (run / "checkpoints").mkdir(parents=True)
        for name in ("checkpoints/lock", "metrics.csv", "model.keras"):
            (run / name).write_text("another run's\n")

    told = "metrics.csv cannot be written: .*belongs to another run|No checkpoint was written"
    with (
        pytest.warns(UserWarning, match=told),
        pytest.raises(UsageError, match="belongs to another run"),
    ):
        train(run, Checkpoints(), 3, [Between(replace)])
    assert not list(run.glob("checkpoints/*step-*"))
    assert not (run / "events.jsonl").exists()
    for name in ("metrics.csv", "model.keras"):
        assert (run / name).read_text() == "another run's\n"
