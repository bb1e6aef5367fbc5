"""Load a saved model and go on training it on all ranks.

Saving needs nothing: a model whose optimizer is distributed saves as if it were not (see optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.compression import Compression
from hvdtrain.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with keras.saving.load_model and make its optimizer distributed, with its state.

    Other arguments of DistributedOptimizer than `compression` are not in the file: load with
    keras.saving.load_model and wrap `model.optimizer` to give them.

    Args:
        filepath: a .keras or .h5 file.
        custom_optimizers: optimizer classes of your own.
        custom_objects: name -> class or function of your own.
        compression: of the gradients.
        legacy_opts: Horovod's, for Keras 2's legacy optimizers.

    Returns:
        The model; compiled, if it was when it was saved.

    Raises:
        UsageError: `legacy_opts`.
    """
    if legacy_opts:
        raise UsageError("load_model: Keras 3 has no legacy optimizers, leave legacy_opts out")
    own = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects=own | dict(custom_objects or {}))
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
