"""Loading a saved model to continue training it on all ranks.

Saving needs no code here: a model with a distributed optimizer is saved as if its optimizer were plain (see
optimizer.py).
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.compression import Compression
from hvdtrain.collectives.reduction import OPS
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.keras_internals.keras_files import optimizer_in
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed, optimizer_values_in_hdf5
from hvdtrain.keras_internals.variables import assign


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with keras.saving.load_model, and make its optimizer distributed without losing its state.

    The file says which `op` and `backward_passes_per_step` the optimizer had, and whether these were averaged. To pass
    other arguments than `compression`, load the model with keras.saving.load_model and wrap `model.optimizer`.

    Args:
        filepath: A .keras or .h5 file.
        custom_optimizers: Your own optimizer classes.
        custom_objects: Your own classes and functions, by name. As in Horovod, the entry of the optimizer may be a
            function that creates it: {"Mine": lambda **config: hvd.DistributedOptimizer(Mine(**config))}.
        compression: Compression of the gradients, as in DistributedOptimizer.
        legacy_opts: For Keras 2's legacy optimizers; must be False.

    Returns:
        The model, compiled if it was compiled when it was saved.

    Raises:
        UsageError: `legacy_opts` is set, or the optimizer's state does not fit the model.
    """
    if legacy_opts:
        raise UsageError("load_model: Keras 3 has no legacy optimizers: leave legacy_opts out")
    own = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    path = os.fspath(filepath)
    kind, noted = optimizer_in(path)
    custom = _with_makers(own | dict(custom_objects or {}), kind or "")
    model = keras.saving.load_model(path, custom_objects=custom)
    if getattr(model, "optimizer", None) is None:
        return model
    if path.endswith((".h5", ".hdf5")):
        model.optimizer = _with_state(model, path)
    if not is_distributed(model.optimizer):
        DistributedOptimizer(
            model.optimizer,
            compression=compression,
            op=OPS[noted.get("op", "Average")],
            backward_passes_per_step=inner_of(model.optimizer).gradient_accumulation_steps or 1,
            average_aggregated_gradients=noted.get("average_aggregated_gradients", True),
        )
    return model


def _with_makers(custom: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Return `custom` with a class in place of a function that creates the optimizer, which Keras 3 does not accept."""
    make = custom.get(optimizer)
    if not isinstance(make, types.FunctionType):
        return custom

    def from_config(cls: type, config: dict[str, Any]) -> Any:
        rate = config.get("learning_rate")
        if isinstance(rate, dict):
            config = config | {"learning_rate": keras.saving.deserialize_keras_object(rate)}
        return make(**config)

    return custom | {optimizer: type(optimizer, (), {"from_config": classmethod(from_config)})}


def _with_state(model: keras.Model, path: str) -> Any:
    """Return a new optimizer like the model's, with the state from the .h5 file, which Keras 3.15 does not restore.

    (Keras builds the optimizer without variables.)
    """
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    values = optimizer_values_in_hdf5(path)
    if not values:
        return optimizer
    shapes = [tuple(v.shape) for v in optimizer.variables]
    if shapes != [np.shape(value) for value in values]:
        raise UsageError(
            f"{path}: the optimizer state in the file does not fit {type(optimizer).__name__} for this model"
        )
    assign(optimizer.variables, values)
    return optimizer
