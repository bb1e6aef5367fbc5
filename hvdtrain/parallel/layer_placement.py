"""Place the layers of one process on several devices.

For a process with several GPUs whose model does not fit on one of them. A layer's variables and computation are placed
on the device that the plan names. There are no micro-batches, so one device computes while the others wait; where
that matters, use pipeline stages with one rank per GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.variables import make_again
from hvdtrain.parallel.tensor.convert import Layers


def place(model: keras.Model, plan: Mapping[str, str]) -> keras.Model:
    """Place layers on devices; return the model, for model.fit or a Trainer.

    Layers that no pattern matches stay where TensorFlow puts them, on the first GPU. A pattern that matches a layer
    applies to the layers inside it, unless another pattern matches those. The placement is not saved with the model:
    place the layers again after loading. With GPUs, call `hvdtrain.init(whole_machine=True)` first, so that this
    process sees all of them, and place the layers before you create a `Trainer`.

    Args:
        model: A built or unbuilt model that has not been trained.
        plan: Mapping from regular expressions to devices, such as "GPU:1". An expression, such as "block_[01]/.*",
            must match the whole path of a layer: the names of the layers that contain it, then its own.

    Returns:
        The same model.

    Raises:
        UsageError: A pattern is not a regular expression, matches no layer, or contradicts another one; a device does
            not exist; the optimizer already has state.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise UsageError("place: the optimizer already has its state: call place before training")
    layers = Layers(model)
    devices = _devices(plan)
    found: dict[int, str] = {}
    for pattern, device in devices.items():
        for identity in _named(layers, pattern):
            if found.setdefault(identity, device) != device:
                raise UsageError(
                    f"place: layer {layers.paths[identity][0]!r} is placed on {found[identity]} and on "
                    f"{device}: only one pattern may match it"
                )
    # Outer layers first, so that patterns for inner layers take precedence.
    for identity in sorted(found, key=lambda i: layers.paths[i][0].count("/")):
        _put(layers.by_id[identity], found[identity])
    return model


def _devices(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan with TensorFlow's full device names."""
    known = {
        f"{device.device_type}:{device.name.rsplit(':', 1)[1]}": device.name
        for device in tf.config.list_logical_devices()
    }
    found = {}
    for pattern, wanted in plan.items():
        short = str(wanted).upper().removeprefix("/").removeprefix("DEVICE:")
        if short not in known:
            raise UsageError(
                f"place: no device {wanted!r} for {pattern!r}: this process sees "
                f"{', '.join(known)}. A rank of a job sees one GPU; to see all of them, call "
                "hvdtrain.init(whole_machine=True) first"
            )
        found[pattern] = known[short]
    return found


def _named(layers: Layers, pattern: str) -> list[int]:
    try:
        named = layers.named(pattern)
    except re.error as error:
        raise UsageError(f"place: {pattern!r} is not a regular expression: {error}") from None
    if not named:
        paths = [
            paths[0]
            for identity, paths in layers.paths.items()
            if not isinstance(layers.by_id[identity], keras.layers.InputLayer)
        ]
        shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
        raise UsageError(f"place: no layer path matches {pattern!r}. Paths: {shown}")
    return named


def _put(layer: keras.layers.Layer, device: str) -> None:
    """Move a layer's variables to `device`, and build and call the layer there."""
    with tf.device(device):
        for variable in layer.variables:
            make_again(variable)
    layer.build = _under(device, layer.build)
    layer.call = _under(device, layer.call)


def _under(device: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with tf.device(device):
            return method(*args, **kwargs)

    return placed
