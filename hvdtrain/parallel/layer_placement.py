"""Layers of one process on several of its devices, by a plan.

For one process with several GPUs whose model does not fit one of them: variables and work of a layer are where the
plan says, and tensors travel between. One device computes while the others wait, for nothing is cut into micro-batches:
where that matters use pipeline stages, a rank for each GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.parallel.tensor.convert import Layers


def place(model: keras.Model, plan: Mapping[str, str]) -> keras.Model:
    """Put layers on devices; return the model, which trains by model.fit and by Trainer.

    Layers that no pattern names stay where TensorFlow puts them: on the first GPU. A pattern that names a layer with
    layers inside it places all of these; where patterns name the inner ones as well, those count. Not saved with
    the model: place again after loading. With GPUs, let this process see them all first:
    `hvdtrain.init(whole_machine=True)`, and place before `Trainer` is made.

    Args:
        model: built or not; not yet trained.
        plan: regular expression for the whole path of layers (its name behind those of the layers that it is
            in, such as "block_[01]/.*") -> device, such as "GPU:1".

    Raises:
        UsageError: a pattern that names no layer or that another one contradicts, a device that does
            not exist, or an optimizer that has its state already.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise UsageError(
            "place: the optimizer already has its state: place the model before training it"
        )
    layers = Layers(model)
    devices = _devices(plan)
    found: dict[int, str] = {}
    for pattern, device in devices.items():
        for identity in _named(layers, pattern):
            if found.setdefault(identity, device) != device:
                raise UsageError(
                    f"place: layer {layers.paths[identity][0]!r} is put on {found[identity]} and on {device}: let one "
                    "pattern name it"
                )
    # Outer layers first, so that the inner ones' word is the last.
    for identity in sorted(found, key=lambda i: layers.paths[i][0].count("/")):
        _put(layers.by_id[identity], found[identity])
    return model


def _devices(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan with TensorFlow's names of its devices."""
    known = {
        f"{device.device_type}:{device.name.rsplit(':', 1)[1]}": device.name
        for device in tf.config.list_logical_devices()
    }
    found = {}
    for pattern, wanted in plan.items():
        short = str(wanted).upper().removeprefix("/").removeprefix("DEVICE:")
        if short not in known:
            raise UsageError(
                f"place: {pattern!r} is to be on {wanted!r}, but this process has "
                f"{', '.join(known)}. A rank of a job sees one GPU: for all of them call "
                "hvdtrain.init(whole_machine=True) first"
            )
        found[pattern] = known[short]
    return found


def _named(layers: Layers, pattern: str) -> list[int]:
    try:
        named = [
            identity
            for identity, paths in layers.paths.items()
            if any(re.fullmatch(pattern, path) for path in paths)
        ]
    except re.error as error:
        raise UsageError(f"place: {pattern!r} is not a regular expression: {error}") from None
    if not named:
        paths = [
            paths[0]
            for identity, paths in layers.paths.items()
            if not isinstance(layers.by_id[identity], keras.layers.InputLayer)
        ]
        shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
        raise UsageError(f"place: no layer's path is {pattern!r}. Paths: {shown}")
    return named


def _put(layer: keras.layers.Layer, device: str) -> None:
    """Move a layer's variables to a device; make it build and work there."""
    with tf.device(device):
        for variable in layer.variables:
            graph_internals.make_again(variable)
    layer.build = _under(device, layer.build)
    layer.call = _under(device, layer.call)


def _under(device: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with tf.device(device):
            return method(*args, **kwargs)

    return placed
