"""Keras's files: the paths of a model's variables in a .keras file, and what is read of a file by itself.

Tested with Keras 3.15. A file identifies layers by class and position, not by name, so that models of the same
structure can load each other's files.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import keras
from keras.src.legacy.saving import saving_utils
from keras.src.saving import saving_lib

from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed

OPTIMIZER = "optimizer"
_VALUES = "vars"
_NOTE = "hvdtrain"
OPTIMIZER_VALUES = f"{OPTIMIZER}/{_VALUES}/"


class _Places(saving_lib.H5IOStore):
    """Store that collects what a model would write, by path, instead of writing it."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
        del metadata
        return self.found.setdefault(path, {})


def stored_variables(model: keras.Model) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the variables and values of a model, without its optimizer, by their paths in a file.

    Also works for variables without values.

    Returns:
        Path -> (variable or value, its shape).
    """
    store = _Places()
    optimizer = getattr(model, "optimizer", None)
    saving_lib._save_state(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables={id(optimizer)},
    )
    return {
        _place(group, key): (value, tuple(value.shape))
        for group, values in store.found.items()
        for key, value in values.items()
    }


def optimizer_places(optimizer: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the variables of a built optimizer by their paths in a file, as `stored_variables` does."""
    return {
        _place(OPTIMIZER, str(number)): (variable, tuple(variable.shape))
        for number, variable in enumerate(optimizer.variables)
    }


def _place(group: str, key: str) -> str:
    return "/".join([*([group] if group else []), _VALUES, key])


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, tuple[int, ...]], dict[str, Any]]]:
    """Open a .keras file; yield the shapes of its arrays by path, and its configuration. Runs no code from the file.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: It is not a readable .keras file.
    """
    with zipfile.ZipFile(path) as archive:
        config = json.loads(saving_lib._safe_zip_read(archive, saving_lib._CONFIG_FILENAME))
        store = saving_lib.H5IOStore(saving_lib._VARS_FNAME_H5, archive=archive, mode="r")
        try:
            shapes: dict[str, tuple[int, ...]] = {}

            def note(name: str, item: Any) -> None:
                if hasattr(item, "shape"):
                    shapes[name] = tuple(item.shape)

            store.h5_file.visititems(note)
            yield shapes, config
        finally:
            store.close()


def load_values(model: keras.Model, path: Path, optimizer_too: bool) -> None:
    """Load the variables of a built model, as keras.Model.load_weights does.

    Args:
        model: A built model.
        path: File to read.
        optimizer_too: Also load the state of its optimizer, which is built.

    Raises:
        ValueError: The file does not fit the model.
    """
    skipped = [] if optimizer_too else [model.optimizer]
    saving_lib.load_weights_only(model, str(path), objects_to_skip=skipped)


def optimizer_class(config: dict[str, Any]) -> str | None:
    """Return the class name of the optimizer in a file's `config`: for a LossScaleOptimizer, of the inner one."""
    found = (config.get("compile_config") or {}).get("optimizer")
    while isinstance(found, dict):
        inner = (found.get("config") or {}).get("inner_optimizer")
        if inner is None:
            return str(found.get("class_name"))
        found = inner
    return found


def note_arguments() -> None:
    """Let files say with which arguments a model's optimizer was made distributed, beside Keras's version. Idempotent.

    Plain Keras does not read it: its own configuration of the optimizer must have no arguments but the class's.
    """
    correct(saving_lib, "_serialize_model_as_json", _with_note)
    correct(saving_utils, "model_metadata", _with_note_in_hdf5)


def _with_note(original: Callable[..., Any], model: Any) -> tuple[str, str]:
    config, metadata = original(model)
    return config, json.dumps(json.loads(metadata) | _note(model))


def _with_note_in_hdf5(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    return original(model, *args, **kwargs) | _note(model)


def _note(model: Any) -> dict[str, Any]:
    optimizer = getattr(model, "optimizer", None)
    if not is_distributed(optimizer):
        return {}
    return {_NOTE: inner_of(optimizer).hvdtrain_reducer.reduction.arguments}


def optimizer_in(path: str) -> tuple[str | None, dict[str, Any]]:
    """Return the class name of the optimizer in a .keras or .h5 file, and the arguments of `note_arguments`.

    None and {} if it has none, or is neither.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            config, metadata = (
                json.loads(saving_lib._safe_zip_read(archive, name))
                for name in (saving_lib._CONFIG_FILENAME, saving_lib._METADATA_FILENAME)
            )
        return optimizer_class(config), metadata.get(_NOTE, {})
    if not h5py.is_hdf5(path):
        return None, {}
    with h5py.File(path, "r") as file:
        config, noted = (json.loads(file.attrs.get(n, "{}")) for n in ("training_config", _NOTE))
    made = optimizer_class({"compile_config": {"optimizer": config.get("optimizer_config")}})
    return made, noted
