"""The whole of a model that is divided over ranks: its configuration for the file, and its variables here.

It is kept as a copy without values, made from the model's configuration, so layers have the same names. The copy has
values only while a file is written or read, on rank 0 and in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.copies import model_again, model_config, plain_optimizer
from hvdtrain.keras_internals.deferred_variables import (
    deferred_variables_of,
    initialize,
    release,
    rename,
)
from hvdtrain.keras_internals.models import compile_like
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.keras_internals.variables import variable_name


def make_part(part: keras.Model, whole: keras.Model) -> None:
    """Mark `part` as this rank's part of `whole`, and make its own methods for saving and loading raise.

    Args:
        part: The model itself, with split layers, or one stage of it.
        whole: The whole model; see `Unsplit`.

    Raises:
        UsageError: See `Unsplit`. Later calls of `save`, `save_weights`, `export` and `load_weights` of `part` raise
            it as well.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "This rank has only a part of the model: save all of it with Trainer.save, which every rank calls, "
            "with run_dir, or with Keras's ModelCheckpoint"
        )

    # Not through Keras's __setattr__, which would track (and save) the values.
    object.__setattr__(part, "hvdtrain_unsplit", Unsplit(whole))
    for method in ("save", "save_weights", "export", "load_weights"):
        object.__setattr__(part, method, refuse)


def unsplit_of(model: keras.Model) -> Unsplit | None:
    """Return the whole model of which `model` is a part, or None if `model` is whole."""
    return getattr(model, "hvdtrain_unsplit", None)


def require_whole_optimizer(model: keras.Model) -> None:
    """Raise UsageError if `model` is a part and its optimizer could not be saved with the whole; before training."""
    if unsplit_of(model) is not None:
        plain_optimizer(model.optimizer)


class Unsplit:
    """The whole of a model that is divided, or about to be.

    Args:
        model: Built model, before it is cut into stages. Its layers may be split, since they know their whole sizes;
            its variables need no values.

    Attributes:
        variables: The model's variables in order. The parts on this rank keep these objects.

    Raises:
        UsageError: The model cannot be recreated from its configuration, so that no file of it would load.
    """

    def __init__(self, model: keras.Model) -> None:
        self.variables: list[Any] = list(model.variables)
        try:
            config, custom = model_config(model)
            with deferred_variables_of():
                self._copy = model_again(config, custom)
        except Exception as error:  # A user's get_config and from_config may raise anything.
            raise UsageError(
                f"Model {model.name!r} cannot be recreated from its configuration, which saving a "
                "model that is divided over ranks requires: give your own layers a get_config "
                "and register them (keras.saving.register_keras_serializable). Keras says: "
                f"{error}"
            ) from error
        shapes = [_whole_shape(v) for v in self.variables]
        copied = [tuple(v.shape) for v in self._copy.variables]
        if shapes != copied:
            raise UsageError(
                f"Model {model.name!r}, recreated from its configuration, has {len(copied)} "
                f"variables of other shapes or order than its own {len(shapes)}: a file of it "
                "would not load. Do the get_config methods of your own layers return all that "
                "their constructors were given?"
            )
        for variable, copy in zip(self.variables, self._copy.variables, strict=True):
            rename(copy, variable_name(variable))
            release(copy)

    @contextmanager
    def whole(self, model: keras.Model) -> Iterator[keras.Model]:
        """Yield the whole model in host memory, compiled like `model` but with a plain optimizer; all values are zero.

        Its memory is released when the block ends.
        """
        copy = self._copy
        with tf.device("CPU:0"):
            for variable in copy.variables:
                initialize(variable)
            optimizer = plain_optimizer(model.optimizer)
            compile_like(copy, model, optimizer)
            if model.optimizer.built:
                optimizer.build(copy.trainable_variables)
            try:
                yield copy
            finally:
                copy.optimizer = None
                for variable in copy.variables:
                    release(variable)


def _whole_shape(variable: Any) -> tuple[int, ...]:
    shape = tuple(variable.shape)
    shard = shard_of(variable)
    return shape if shard is None else shard.whole_shape(shape)
