"""What layers learn from data outside their variables: vocabularies, bin boundaries, a given mean and variance."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SAMPLED = 16
"""Maximum number of numbers of each kind by which ranks check that they have learnt the same."""


@dataclass(frozen=True)
class Adapted:
    """What one layer has learnt from data, or was given in its place.

    Attributes:
        what: Its kind and its layer, such as "vocabulary 0 (string_lookup)".
        size: Number of tokens or boundaries, or of elements of the mean.
        digest: First 8 bytes of the SHA-256 of the tokens and their indices.
        numbers: Samples of what was computed from the data, which machines may round differently.
    """

    what: str
    size: int
    digest: bytes
    numbers: list[float]


def adapted_states(model: keras.Model) -> list[Adapted]:
    """Return what the layers of a model have learnt with `adapt` outside their variables, or were given instead."""
    found: list[Adapted] = []
    for layer in model._flatten_layers():
        name = _name_of(layer)
        for kind, exact, numbers in _values(layer):
            digest = hashlib.sha256(b"".join(map(_content, exact))).digest()[:8]
            size = len((exact or numbers)[0])
            what = f"{kind} {len(found)} ({name})"
            found.append(Adapted(what, size, digest, _sampled(numbers)))
    return found


def adapted_statistics(model: keras.Model) -> dict[str, list[float | str]]:
    """Return samples of the means and variances that Normalization layers have learnt and keep in variables.

    Without those of layers that are not adapted: a rank may leave that to another, and get its variables.
    """
    found: dict[str, list[float | str]] = {}
    layers = [one for one in model._flatten_layers() if isinstance(one, keras.layers.Normalization)]
    for number, layer in enumerate(layers):
        if layer.input_mean is not None or not layer.built:
            continue
        mean, variance = (np.ravel(v.numpy()) for v in (layer.adapt_mean, layer.adapt_variance))
        if mean.any() or (variance != 1).any():
            name = f"the mean and variance {number} of {_name_of(layer)!r}"
            found[name] = [*_sampled([mean, variance])]
    return found


def _name_of(layer: Any) -> str:
    """Return the name without the number that Keras appends: a rank may have made another model before this one."""
    return re.sub(r"_\d+$", "", layer.name)


def _sampled(arrays: Iterable[np.ndarray]) -> list[float]:
    return [float(number) for one in arrays for number in _sample(one)]


def _values(layer: Any) -> Iterator[tuple[str, list[np.ndarray], list[np.ndarray]]]:
    """Yield kind, tokens and their indices, and numbers."""
    if isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
        weights = getattr(layer, "idf_weights", None)
        numbers = [weights.numpy()] if isinstance(weights, tf.Variable) else []
        yield "vocabulary", _vocabulary(layer), numbers
    elif isinstance(layer, keras.layers.Discretization):
        bounds = [] if layer.bin_boundaries is None else layer.bin_boundaries
        yield "bin boundaries", [], [np.asarray(bounds, np.float64)]
    elif isinstance(layer, keras.layers.Normalization) and layer.input_mean is not None:
        given = [layer.input_mean, layer.input_variance]
        yield "mean and variance", [], [np.ravel(np.asarray(one, np.float64)) for one in given]


def _vocabulary(layer: Any) -> list[np.ndarray]:
    """Return the tokens of a lookup layer in the order of their indices, and the indices."""
    if layer.lookup_table.size() == 0:  # Not adapted yet; such a table cannot be exported.
        return [np.zeros(0)]
    exported = [one.numpy() for one in layer.lookup_table.export()]
    indices, tokens = exported if layer.invert else reversed(exported)
    order = np.argsort(indices)
    return [tokens[order], indices[order]]


def _sample(numbers: np.ndarray) -> np.ndarray:
    places = np.linspace(0, len(numbers) - 1, SAMPLED if len(numbers) else 0)
    return numbers[np.unique(places.astype(int))]


def _content(values: np.ndarray) -> bytes:
    """Return the values as bytes that differ for different values: strings with their lengths."""
    if values.dtype != object:
        return values.tobytes()
    return b"".join(b"%d:%s" % (len(token), token) for token in values)
