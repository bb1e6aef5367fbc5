"""Atomic replacement of files that Keras writes, as in `replaced_files`.

Applies to `Model.save`, `Model.save_weights`, and so to ModelCheckpoint; and to the two files of BackupAndRestore, as a
pair. Tested with Keras 3.15, which writes in place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras.callbacks import BackupAndRestore
from keras.src.saving import saving_api
from keras.src.utils import file_utils

from hvdtrain.keras_internals.corrections import correct
from hvdtrain.replaced_files import beside, flush, flush_folder, replacing

_SUFFIXES = (".keras", ".h5", ".hdf5")


def prepare_saving() -> None:
    """Install the corrections. Idempotent."""
    correct(saving_api, "save_model", _save)
    correct(saving_api, "save_weights", _save)
    correct(BackupAndRestore, "_save_model", _save_backup)
    correct(BackupAndRestore, "_load_model", _load_backup)


def _save(
    original: Callable[..., Any], model: Any, filepath: Any, overwrite: bool = True, **kwargs: Any
) -> Any:
    """Replacement of saving_api.save_model and save_weights; saves to several or remote files are left to Keras."""
    single = kwargs.get("zipped") is not False and kwargs.get("max_shard_size") is None
    path = _local_file(filepath) if single else None
    if path is None or (path.exists() and not overwrite):
        return original(model, filepath, overwrite, **kwargs)
    with replacing(path) as temporary:
        return original(model, str(temporary), overwrite, **kwargs)


def _local_file(filepath: Any) -> Path | None:
    """Return the file to write; None if it is no local .keras or .h5 file, or its folder takes no other one."""
    if not isinstance(filepath, str | os.PathLike) or file_utils.is_remote_path(str(filepath)):
        return None
    path = Path(filepath).resolve()  # The type is derived from the name of the file itself.
    return path if path.suffix in _SUFFIXES and os.access(path.parent, os.W_OK) else None


def _save_backup(original: Callable[..., Any], self: Any) -> None:
    """Replacement of BackupAndRestore._save_model: write both files, then rename the weights, then the epoch."""
    if file_utils.is_remote_path(str(self.backup_dir)):
        original(self)
        return
    weights, epoch = places = Path(self._weights_path), Path(self._training_metadata_path)
    if self.double_checkpoint:
        before = self._prev_weights_path, self._prev_training_metadata_path
        for place, copy in zip(places, before, strict=True):
            if place.exists():
                shutil.copyfile(place, copy)
    self._weights_path, self._training_metadata_path = map(str, map(beside, places))
    try:
        original(self)
    finally:
        self._weights_path, self._training_metadata_path = str(weights), str(epoch)
    flush(beside(epoch))
    for place in places:
        beside(place).replace(place)
    flush_folder(weights.parent)


def _load_backup(original: Callable[..., Any], self: Any) -> None:
    """Replacement of BackupAndRestore._load_model: first complete or discard an interrupted save."""
    weights, epoch = Path(self._weights_path), Path(self._training_metadata_path)
    if not file_utils.is_remote_path(str(self.backup_dir)) and beside(epoch).exists():
        if beside(weights).exists():
            beside(epoch).unlink()
        else:
            beside(epoch).replace(epoch)
    original(self)
