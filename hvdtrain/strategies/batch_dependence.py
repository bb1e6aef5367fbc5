"""Find layers and losses that may treat a part of a batch differently from the whole batch.

Two kinds of Keras layers do so by design: those that normalize by batch statistics, and those that draw random numbers.
No sum of gradients can make them equal to one worker's, so they are named in a warning before training starts, and are
switched off while the probe tests the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdtrain.keras_internals.compiled_losses import own_losses
from hvdtrain.keras_internals.graph import Call, calls_of, functional_of
from hvdtrain.keras_internals.models import overridden

KNOWN = ("keras.", "hvdtrain.")
"""Packages whose layers treat each example independently, except those named below."""
RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
"""Attributes of layers that draw random numbers; at 0 they draw none. Image augmentation layers lack them and always
draw."""


def normalizes(layer: Any) -> bool:
    """Return whether `layer` normalizes by batch statistics, on one worker or over all of them."""
    return isinstance(layer, keras.layers.BatchNormalization)


def has_generator(layer: Any) -> bool:
    """Return whether `layer` is a Keras layer that may draw random numbers in training."""
    generators = (getattr(layer, name, None) for name in ("seed_generator", "generator"))
    return type(layer).__module__.startswith("keras.") and any(
        isinstance(one, keras.random.SeedGenerator) for one in generators
    )


def is_all_of_keras(model: keras.Model) -> bool:
    """Return whether no code of the user's computes the loss of a compiled model: no step, layer or loss."""
    if overridden(model, "train_step", "compute_loss") or own_losses(model):
        return False
    return not any(map(_is_own, model._flatten_layers(include_self=False)))


def warning_by_nature(model: keras.Model) -> str | None:
    """Return a warning if a built model's result depends on the number of workers, or None."""
    layers = list(model._flatten_layers())
    own = [f"{layer.name!r}" for layer in layers if uses_partial_statistics(layer)]
    random = [f"{layer.name!r}" for layer in layers if is_random(layer)]
    said = []
    if own:
        said.append(
            f"{first_names(own)}, which normalizes by a worker's share of the batch "
            "(hvdtrain.keras.SyncBatchNormalization normalizes by all of it)"
        )
    if random:
        said.append(f"{first_names(random)}, which draws different random numbers on each worker")
    return (
        f"Training depends on the number of workers because of {'; and because of '.join(said)}"
        if said
        else None
    )


def uses_partial_statistics(layer: Any) -> bool:
    """Return whether `layer` normalizes by the statistics of only that part of the batch which it is given."""
    synchronized = getattr(layer, "hvdtrain_synchronized", False)
    return normalizes(layer) and layer.trainable and not synchronized


def is_random(layer: Any) -> bool:
    """Return whether `layer` is a Keras layer that draws random numbers in training."""
    rates = [getattr(layer, name) for name in RATES if hasattr(layer, name)]
    return has_generator(layer) and (not rates or any(rates))


def first_names(names: list[str]) -> str:
    """Return the first three of `names`, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def warning_of_parts(model: keras.Model, part: str, own_losses: Iterable[str] = ()) -> str | None:
    """Return a warning if a built model may train differently on parts of a batch, or None.

    For strategies in which no rank can try a step beforehand: pipeline stages, as none holds the whole model, and the
    replicas of tf.distribute.

    Args:
        model: Whole model.
        part: Name of a part, such as "a micro-batch".
        own_losses: Names of the compiled losses that are not Keras's.
    """
    layers = list(model._flatten_layers())
    found = {
        f"normalizes by {part}": filter(uses_partial_statistics, layers),
        "draws random numbers for each": filter(is_random, layers),
        "takes a step for each": (
            layer for layer in layers if isinstance(layer, keras.layers.SpectralNormalization)
        ),
        "differs if it looks at several examples at once, or changes a state": filter(
            _is_own, layers
        ),
    }
    said = {what: [f"{layer.name!r}" for layer in own] for what, own in found.items()}
    graphs = {functional_of(layer) for layer in layers if isinstance(layer, keras.Model)} - {None}
    said["looks at several examples at once"] = [
        f"{call.name!r}" for graph in graphs for call in calls_of(graph) if _mixes_examples(call)
    ]
    said["differs unless it is a mean of one value for each example"] = [
        f"the loss {name!r}" for name in own_losses
    ]
    parts = [f"{first_names(names)} {what}" for what, names in said.items() if names]
    if not parts:
        return None
    return (
        f"Training uses {part} at a time, which may not give the result of the whole batch: "
        f"{'; '.join(parts)}"
    )


def _mixes_examples(call: Call) -> bool:
    """Return whether an operation, or a layer of Keras's, works along the first axis, that of the examples."""
    if not call.inputs or any(not tensor.shape or tensor.shape[0] for tensor in call.inputs):
        return False  # Of something else than examples.
    axes = getattr(call.operation, "axis", None)
    axes = axes if isinstance(axes, list | tuple) else [axes]
    # Negative axes count from the end of the larger one: ExpandDims and Stack add an axis, reductions remove some.
    first = {0, -max(len(tensor.shape) for tensor in (*call.inputs, *call.outputs))}
    lost = any(not tensor.shape or tensor.shape[0] for tensor in call.outputs)
    return lost or not first.isdisjoint(axes)


def _is_own(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Lambda) or not type(layer).__module__.startswith(KNOWN)
