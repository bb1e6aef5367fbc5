"""What layers learn from data outside their variables: vocabularies, bin boundaries, a given mean and variance."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Adapted:
    """What one layer has learnt from data, or was given in its place.

    Attributes:
        what: Its kind and its layer, such as "vocabulary 0 (string_lookup)".
        size: Number of values.
        digest: First 8 bytes of the SHA-256 of the values.
    """

    what: str
    size: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.size} values (SHA-256 {self.digest.hex()}...)"


def adapted_facts(model: keras.Model) -> dict[str, str]:
    """Return `adapted_states` as facts that must be the same on every rank; see `require_equal`."""
    return {one.what: str(one) for one in adapted_states(model)}


def adapted_states(model: keras.Model) -> list[Adapted]:
    """Return what the layers of a model have learnt with `adapt` outside their variables, or were given instead."""
    found: list[Adapted] = []
    for layer in model._flatten_layers():
        # Without the number that Keras appends: a rank may have made another model before this one.
        name = re.sub(r"_\d+$", "", layer.name)
        for kind, values in _values(layer):
            content = b"".join(_content(one) for one in values)
            digest = hashlib.sha256(content).digest()[:8]
            found.append(Adapted(f"{kind} {len(found)} ({name})", len(values[0]), digest))
    return found


def _values(layer: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    if isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
        yield "vocabulary", list(_vocabulary(layer))
    elif isinstance(layer, keras.layers.Discretization):
        bounds = [] if layer.bin_boundaries is None else layer.bin_boundaries
        yield "bin boundaries", [np.asarray(bounds, np.float64)]
    elif isinstance(layer, keras.layers.Normalization) and layer.input_mean is not None:
        given = [layer.input_mean, layer.input_variance]
        yield "mean and variance", [np.ravel(np.asarray(one, np.float64)) for one in given]


def _vocabulary(layer: Any) -> Iterator[np.ndarray]:
    """Yield the tokens of a lookup layer in the order of their indices, the indices, and any tf-idf weights."""
    if layer.lookup_table.size() == 0:  # Not adapted yet; such a table cannot be exported.
        yield np.zeros(0)
        return
    exported = [one.numpy() for one in layer.lookup_table.export()]
    indices, tokens = exported if layer.invert else reversed(exported)
    order = np.argsort(indices)
    yield tokens[order]
    yield indices[order]
    weights = getattr(layer, "idf_weights", None)
    if isinstance(weights, tf.Variable):
        yield weights.numpy()


def _content(values: np.ndarray) -> bytes:
    """Return the values as bytes that differ for different values: strings with their lengths."""
    if values.dtype != object:
        return values.tobytes()
    return b"".join(b"%d:%s" % (len(token), token) for token in values)
