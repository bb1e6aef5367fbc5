"""What a model does otherwise on micro-batches than on a whole batch, as far as its parts tell.

No rank has all of the model, so no step can be tried before the first one, as it is without stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdtrain.strategies import by_nature

KNOWN = ("keras.", "hvdtrain.")
"""Packages whose layers treat each example alone, but for those named below."""


def complaint(whole: keras.Model, own_losses: Iterable[str]) -> str | None:
    """Return what is to be said of a model that trains on micro-batches; None if nothing.

    Args:
        whole: all of its stages.
        own_losses: names of compiled losses that are not Keras's.
    """
    layers = [layer for layer in whole._flatten_layers() if layer is not whole]
    found = {
        "normalises by a micro-batch": filter(by_nature.normalises_by_share, layers),
        "draws random numbers for each": filter(by_nature.draws, layers),
        "takes a step for each": (
            layer for layer in layers if isinstance(layer, keras.layers.SpectralNormalization)
        ),
        "differs if it looks at several examples at once, or changes a state": filter(
            _is_own, layers
        ),
    }
    said = {what: [f"{layer.name!r}" for layer in some] for what, some in found.items()}
    said["differs unless it is a mean of one value for each example"] = [
        f"the loss {name!r}" for name in own_losses
    ]
    parts = [f"{by_nature.some(names)} {what}" for what, names in said.items() if names]
    if not parts:
        return None
    return (
        "Pipeline stages train on micro-batches, which may not be what one process does with the batch: "
        f"{'; '.join(parts)}"
    )


def _is_own(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Lambda) or not type(layer).__module__.startswith(KNOWN)
