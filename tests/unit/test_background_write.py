"""A checkpoint that is written while the training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import Checkpoints, Trainer
from hvdtrain.checkpoint.background_write import BackgroundWrite
from hvdtrain.checkpoint.folder import newest, save
from hvdtrain.trainer import resume


def test_it_tells_what_became_of_it() -> None:
    done: list[int] = []
    assert BackgroundWrite(1, lambda: done.append(1)).error() is None
    assert done == [1]

    def fails(error: Exception) -> None:
        raise error

    full = OSError("disk full")
    assert BackgroundWrite(2, lambda: fails(full)).error() is full
    with pytest.raises(ValueError, match="a bug"):
        BackgroundWrite(3, lambda: fails(ValueError("a bug"))).error()


def test_training_goes_on_and_what_is_written_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first checkpoint is written only when a later step has changed the weights."""
    weights: list[Any] = []
    go_on = threading.Event()
    written: list[Any] = []

    def slow(folder: Path, number: int, content: Any, keep: int) -> None:
        assert go_on.wait(60)
        save(folder, number, content, keep)
        found = newest(folder)
        assert found is not None
        written.append(dict(found.arrays))

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            weights.append([v.numpy().copy() for v in self.model.trainable_variables])
            if batch == 2:
                assert written == [], "the third step did not wait"
                go_on.set()

    monkeypatch.setattr(resume, "save", slow)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    trainer = Trainer(
        model, keras.optimizers.Adam(0.1), "mse", global_batch_size=4, run_dir=tmp_path,
        checkpoints=Checkpoints(every_steps=2), seed=0,
    )  # fmt: skip
    x = np.arange(48, dtype="float32").reshape(16, 3) / 48
    trainer.fit(x, x[:, :1], epochs=1, callbacks=[Look()], verbose=0)
    saved = [value for name, value in written[0].items() if not name.startswith("optimizer")]
    for value, then, later in zip(saved, weights[1], weights[2], strict=True):
        np.testing.assert_array_equal(value, then)
        assert not np.array_equal(value, later)
