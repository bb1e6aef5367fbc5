"""What a model does otherwise on parts of a batch than on all of it, as far as its layers and losses tell.

For ways of training in which no rank can try a step before the first one: pipeline stages, of which none has all of
the model, and the replicas of tf.distribute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdtrain.strategies import by_nature

KNOWN = ("keras.", "hvdtrain.")
"""Packages whose layers treat each example alone, but for those named below."""


def complaint(model: keras.Model, part: str, own_losses: Iterable[str] = ()) -> str | None:
    """Return what is to be said of a built model that trains on parts of a batch; None if nothing.

    Args:
        model: all of it.
        part: what a part is called, such as "a micro-batch".
        own_losses: names of compiled losses that are not Keras's.
    """
    layers = list(model._flatten_layers())
    found = {
        f"normalises by {part}": filter(by_nature.normalises_by_share, layers),
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
    return f"What is trained on is {part}, which may not do what the whole batch does: {'; '.join(parts)}"


def _is_own(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Lambda) or not type(layer).__module__.startswith(KNOWN)
