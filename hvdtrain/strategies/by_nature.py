"""Layers of Keras that do something else with a part of a batch than with all of it, by nature.

Two kinds: what normalises by the statistics of a batch, and what draws random numbers. No way of adding up gradients
makes them those of one worker, so they are named before training starts, and hold still while the probe judges the
rest of the model.
"""

from __future__ import annotations

from typing import Any

import keras

RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
"""Attributes by which layers draw; at 0 they do not. Image augmentation has none of them, and always draws."""


def normalises(layer: Any) -> bool:
    """Whether it normalises by the batch, on one worker or over all of them."""
    return isinstance(layer, keras.layers.BatchNormalization)


def has_generator(layer: Any) -> bool:
    """Whether it is a layer of Keras's that may draw random numbers in training."""
    generators = (getattr(layer, name, None) for name in ("seed_generator", "generator"))
    return type(layer).__module__.startswith("keras.") and any(
        isinstance(one, keras.random.SeedGenerator) for one in generators
    )


def complaint(model: keras.Model) -> str | None:
    """Return what is to be said of a built model whose result depends on the number of workers; None if nothing."""
    layers = list(model._flatten_layers())
    own = [f"{layer.name!r}" for layer in layers if normalises_by_share(layer)]
    random = [f"{layer.name!r}" for layer in layers if draws(layer)]
    said = []
    if own:
        said.append(
            f"{some(own)}, which normalises by a worker's share of the batch (hvdtrain.keras.SyncBatchNormalization "
            "normalises by all of it)"
        )
    if random:
        said.append(f"{some(random)}, which draws other random numbers on each worker")
    return (
        f"Training depends on the number of workers by {'; and by '.join(said)}" if said else None
    )


def normalises_by_share(layer: Any) -> bool:
    """Whether it normalises by a part of the batch where it is given one."""
    synchronized = getattr(layer, "hvdtrain_synchronized", False)
    return normalises(layer) and layer.trainable and not synchronized


def draws(layer: Any) -> bool:
    """Whether it is a layer of Keras's that draws random numbers in training."""
    rates = [getattr(layer, name) for name in RATES if hasattr(layer, name)]
    return has_generator(layer) and (not rates or any(rates))


def some(names: list[str]) -> str:
    """Return the first three of `names`, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
