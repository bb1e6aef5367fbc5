"""Write a model to a .keras file, complete or not at all, and read such a file into an existing model.

Only numbers are read from the file: the model and its optimizer are created by the program.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import keras_files
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.keras_internals.models import is_built
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.keras_internals.variables import variable_name

Places = Mapping[str, tuple[Any, tuple[int, ...]]]
WEIGHTS_ALONE = ".weights.h5"
NEW_OPTIMIZER = 2
"""Number of variables of an unbuilt optimizer: iterations and learning rate."""


def write_model(model: keras.Model, path: Path) -> None:
    """Write a .keras or .weights.h5 file; see keras_internals.file_writes.

    Raises:
        UsageError: The file cannot be written: its folder cannot be made, the disk is full, or a folder has its name.
    """
    prepare_saving()
    write = model.save_weights if path.name.endswith(WEIGHTS_ALONE) else model.save
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UsageError(f"save: {path} cannot be written: {error}") from error


def read_model(model: keras.Model, path: Path) -> bool:
    """Load a .keras file into `model`: its weights, its statistics, and the state of its built optimizer.

    Returns:
        Whether the file holds an optimizer's state; if not, the optimizer of `model` is left unchanged.

    Raises:
        UsageError: The model has no variables yet, the file does not exist or cannot be read, or it belongs to another
            model or optimizer; the message names the first variable that differs, and both shapes.
    """
    require_built(model)
    try:
        with keras_files.opened(path) as (stored, config):
            _check_weights(path, stored, keras_files.stored_variables(model))
            has_state = _check_optimizer(path, stored, config, model.optimizer)
        keras_files.load_values(model, path, has_state)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"load: {path} cannot be read as a .keras file: {error}") from error
    return has_state


def require_built(model: keras.Model) -> None:
    """Raise UsageError if the model has no variables yet to load."""
    if not (model.built and is_built(model)):
        raise UsageError(
            "load: the model has no variables yet, because the shapes of its inputs are unknown: "
            "start it with keras.Input(shape), or call trainer.evaluate once first"
        )


def _check_weights(path: Path, stored: Mapping[str, tuple[int, ...]], wanted: Places) -> None:
    for place, (variable, shape) in wanted.items():
        _check_shape(path, stored, place, variable, shape)
    for place, shape in stored.items():
        if place not in wanted and not place.startswith(f"{keras_files.OPTIMIZER}/"):
            raise UsageError(
                f"load: {path} belongs to another model: it has a variable {place!r} of shape "
                f"{list(shape)} that this model lacks"
            )


def _check_shape(
    path: Path,
    stored: Mapping[str, tuple[int, ...]],
    place: str,
    variable: Any,
    shape: tuple[int, ...],
) -> None:
    name = variable_name(variable) if isinstance(variable, keras.Variable) else place
    if place not in stored:
        raise UsageError(
            f"load: {path} belongs to another model: it has no variable for {name!r}, which has "
            f"shape {list(shape)}"
        )
    if stored[place] != shape:
        raise UsageError(
            f"load: {path} belongs to another model: variable {name!r} has shape "
            f"{list(stored[place])} in the file and {list(shape)} here"
        )


def _check_optimizer(
    path: Path, stored: Mapping[str, tuple[int, ...]], config: dict[str, Any], optimizer: Any
) -> bool:
    """Return whether the file holds the state of this optimizer; raise UsageError if it is another optimizer's."""
    # Not the optimizer inside a LossScaleOptimizer: its variables are also stored as the outer one's.
    theirs = [place for place in stored if place.startswith(keras_files.OPTIMIZER_VALUES)]
    wanted = keras_files.optimizer_places(optimizer)
    inner = inner_of(optimizer)
    ours = type(inner).__name__
    name = keras_files.optimizer_class(config) or "another optimizer"
    if not theirs or (name == ours and len(theirs) <= NEW_OPTIMIZER < len(wanted)):
        return False
    if name != ours or len(theirs) != len(wanted):
        raise UsageError(
            f"load: {path} holds the state of {name} in {len(theirs)} variables, and {ours} has {len(wanted)} here: "
            "pass Trainer the optimizer that the file was trained with, or, for the weights alone, the model that "
            "keras.saving.load_model loads from the file"
        )
    for place, (variable, shape) in wanted.items():
        _check_shape(path, stored, place, variable, shape)
    return True
