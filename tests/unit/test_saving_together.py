"""Keras's callbacks that save, where no rank has the whole model or optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks as kc
from keras import layers

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.trainer.callback_ranks import callbacks_of_rank, saving_together


def test_every_rank_checkpoints_and_rank_0_alone_writes_the_rest(tmp_path: Path) -> None:
    checkpoint = kc.ModelCheckpoint(tmp_path / "a.keras", verbose=1)
    given = [checkpoint, kc.CSVLogger(tmp_path / "log.csv"), kc.EarlyStopping()]
    assert callbacks_of_rank(given, is_first=True, saves_together=True) == given
    assert checkpoint.verbose == 1
    assert callbacks_of_rank(given, is_first=False, saves_together=True) == [checkpoint, given[2]]
    assert checkpoint.verbose == 0
    assert callbacks_of_rank(given, is_first=False) == [given[2]]


@pytest.mark.parametrize("is_first", [True, False])
def test_backups_of_parts_are_refused(tmp_path: Path, is_first: bool) -> None:
    given = [kc.BackupAndRestore(str(tmp_path))]
    with pytest.raises(UsageError, match="use ModelCheckpoint, and"):
        callbacks_of_rank(given, is_first, saves_together=True)


def test_a_checkpoint_saves_by_the_common_way(tmp_path: Path) -> None:
    saved: list[Path] = []
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    checkpoint = kc.ModelCheckpoint(tmp_path / "{epoch}.keras")
    checkpoint.set_model(model)
    saving_together([checkpoint], saved.append)
    checkpoint.on_epoch_end(4, {})
    assert saved == [tmp_path / "5.keras"]
    assert checkpoint.model.layers is not None


def test_a_checkpoint_leaves_its_folder_to_the_common_way(tmp_path: Path) -> None:
    """A rank that could not create it, as another one just has, would miss the collectives that save."""
    saved: list[Path] = []
    checkpoint = kc.ModelCheckpoint(tmp_path / "new" / "{epoch}.keras")
    checkpoint.set_model(keras.Sequential([layers.Input((2,)), layers.Dense(1)]))
    saving_together([checkpoint], saved.append)
    for epoch in (0, 1):
        checkpoint.on_epoch_end(epoch, {})
    assert saved == [tmp_path / "new" / "1.keras", tmp_path / "new" / "2.keras"]
    assert not (tmp_path / "new").exists()


def test_the_trainer_checkpoints_whole_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> keras.Model:
        return keras.Sequential([layers.Input((3,)), layers.Dense(2)])

    files: Any = [
        kc.ModelCheckpoint(tmp_path / "new" / "{epoch}.keras"),
        kc.ModelCheckpoint(tmp_path / "all.weights.h5", save_weights_only=True),
    ]
    trainer = hvdtrain.Trainer(
        model, "adam", "mse", global_batch_size=4, layout=hvdtrain.Mesh(), shard_optimizer=True
    )
    saved: list[str] = []
    together = trainer.strategy.save

    def save(model: keras.Model, path: Path) -> None:
        saved.append(path.name)
        together(model, path)

    monkeypatch.setattr(trainer.strategy, "save", save)
    x = np.ones((8, 3), "float32")
    trainer.fit(x, x[:, :2], epochs=2, callbacks=files, verbose=0)
    assert saved == ["1.keras", "all.weights.h5", "2.keras", "all.weights.h5"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["1.keras", "2.keras"]
    loaded = keras.saving.load_model(tmp_path / "new" / "2.keras")
    assert int(loaded.optimizer.iterations) == 4
    for ours, theirs in zip(trainer.model.weights, loaded.weights, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()
    again = model()
    again.load_weights(tmp_path / "all.weights.h5")
    assert (again.weights[0].numpy() == loaded.weights[0].numpy()).all()
