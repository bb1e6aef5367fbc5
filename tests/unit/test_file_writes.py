"""Files that Keras writes over older ones: whoever is killed meanwhile keeps the older ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain.collectives.communicator import LoneRank
from hvdtrain.errors import UsageError
from hvdtrain.keras.writers import failing_together
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.replaced_files import replacing
from hvdtrain.trainer.callback_ranks import backups_kept

KILLED = """
import os, signal, sys
import keras
from keras.src.saving import saving_lib
from hvdtrain.keras_internals.file_writes import prepare_saving

prepare_saving()
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, kernel_initializer="ones")])
path = sys.argv[1]
getattr(model, sys.argv[2])(path)
model.set_weights([2 * value for value in model.get_weights()])
write = saving_lib.H5IOStore.close

def killed(self):
    os.kill(os.getpid(), signal.SIGKILL)

saving_lib.H5IOStore.close = killed
getattr(model, sys.argv[2])(path)
"""


class Killed(BaseException):
    """The process is gone."""


def model(value: float) -> keras.Model:
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    made.set_weights([np.full_like(weight, value) for weight in made.get_weights()])
    return made


@pytest.mark.parametrize(
    ("method", "name"), [("save", "m.keras"), ("save", "m.h5"), ("save_weights", "m.weights.h5")]
)
def test_a_model_is_replaced_whole(tmp_path: Path, method: str, name: str) -> None:
    prepare_saving()
    path = tmp_path / name
    link = tmp_path / f"link.{name}"
    link.symlink_to(path)
    for value in (1, 2):
        getattr(model(value), method)(link if value == 2 else path)
        loaded = model(0)
        loaded.load_weights(path) if method == "save_weights" else loaded.set_weights(
            keras.saving.load_model(path, compile=False).get_weights()
        )
        assert {float(v) for w in loaded.get_weights() for v in w.flat} == {value}
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([name, link.name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"), [("save", "m.keras"), ("save_weights", "m.weights.h5")]
)
def test_a_save_that_is_killed_leaves_the_one_before(
    tmp_path: Path, method: str, name: str
) -> None:
    path = tmp_path / name
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), method], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    loaded = model(0)
    loaded.load_weights(path)
    assert loaded.get_weights()[0].tolist() == [[1, 1], [1, 1]]


def test_what_is_no_plain_file_is_left_to_keras(tmp_path: Path) -> None:
    prepare_saving()
    made = model(1)
    made.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder").is_dir()
    made.save_weights(tmp_path / "w.weights.json", max_shard_size=1)
    assert (tmp_path / "w.weights.json").exists()
    (tmp_path / "m.keras").mkdir()
    with pytest.raises(IsADirectoryError):
        made.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="must end in"):
        made.save_weights(tmp_path / "w.h5")
    assert not list(tmp_path.glob(".tmp.*"))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("survived", range(4))
def test_weights_and_epoch_of_a_backup_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int, double: bool
) -> None:
    """Killed before each of the renames: of the weights' own file, of the weights, of the epoch; and not at all."""
    prepare_saving()

    def backup(value: float, epoch: int) -> Any:
        callback = keras.callbacks.BackupAndRestore(tmp_path / "backup", double_checkpoint=double)
        callback.set_model(model(value))
        callback._current_epoch = epoch
        return callback

    backup(1, 1)._save_model()
    left = survived
    replace, unlink = Path.replace, Path.unlink

    def replace_or_die(self: Path, target: Path) -> Path:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_or_die)
        # Who is killed cleans nothing up.
        patched.setattr(Path, "unlink", lambda self, **k: None if left == 0 else unlink(self, **k))
        try:
            backup(2, 2)._save_model()
        except Killed:
            assert survived < 3
    found = backup(0, 0)
    found.on_train_begin()
    value = float(found.model.get_weights()[0][0, 0])
    assert (value, found.model._initial_epoch) == ((1, 1) if survived < 2 else (2, 2))
    metadata = json.loads((tmp_path / "backup" / "training_metadata.json").read_text())
    assert metadata["epoch"] == value


def test_a_folder_that_takes_no_other_file_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_saving()
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("renamed"))
    model(1).save(tmp_path / "m.keras")
    assert (tmp_path / "m.keras").exists()


def test_a_backup_outlives_the_end_of_training(tmp_path: Path) -> None:
    callback = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    callback.set_model(model(1))
    callback.on_epoch_end(0)
    with pytest.raises(OSError), backups_kept([callback]):
        callback.on_train_end()
        raise OSError("the final model cannot be written")
    assert (tmp_path / "backup").exists()
    with backups_kept([callback]):
        callback.on_train_end()
        assert (tmp_path / "backup").exists()
    assert not (tmp_path / "backup").exists()


def test_a_log_on_a_full_disk_is_left_out_on_a_rank_alone_too() -> None:
    log = [keras.callbacks.CSVLogger("/dev/full")]
    callbacks = keras.callbacks.CallbackList(
        failing_together(log, log, LoneRank(0)),
        model=model(1),
        epochs=2,
    )
    callbacks.on_train_begin()
    with pytest.warns(UserWarning, match=r"CSVLogger failed; it will not be called again"):
        callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.on_epoch_end(1, {"loss": 1.0})
    callbacks.on_train_end()


def test_a_log_that_cannot_be_begun_is_an_error_at_once() -> None:
    log = [keras.callbacks.CSVLogger("/missing/log.csv")]
    callbacks = keras.callbacks.CallbackList(
        failing_together(log, log, LoneRank(0)),
        model=model(1),
    )
    with (
        pytest.raises(UsageError, match=r"callback CSVLogger: .*No such file"),
        pytest.warns(UserWarning, match="the run will stop"),
    ):
        callbacks.on_train_begin()


def test_ranks_that_write_one_file_have_a_temporary_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that forgets to ask for the rank: what is there in the end is whole."""
    path = tmp_path / "model.keras"
    with replacing(path) as first:
        first.write_text("first")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
        with replacing(path) as second:
            second.write_text("second")
    assert path.read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["model.keras"]
