"""Clip gradients by norm where a rank holds only parts of the gradients.

A norm is of a whole variable, or of all of the model's: the squares of parts are added up over the ranks that
hold them, whichever way the parts were made (split layers, sharded optimizer state, stages of a pipeline).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator

Parts: TypeAlias = Callable[[Any], Sequence[Communicator]]
"""The groups of ranks over which the parts of a variable lie; none: this rank holds all of it."""


def squared_norms(
    gradients: Sequence[Any], variables: Sequence[Any], parts: Parts, name: str
) -> list[tf.Tensor | None]:
    """Return the squared norm of each whole gradient, float32 scalars; None for None. A collective.

    Args:
        gradients: this rank's parts: a tensor, IndexedSlices or None for each variable.
        variables: the variables.
        parts: over which ranks to add.
        name: the first part of the collectives' names.
    """
    found: list[tf.Tensor | None] = [None if g is None else _square(g) for g in gradients]
    over: dict[tuple[tuple[int, ...], ...], tuple[Sequence[Communicator], list[int]]] = {}
    for place, (square, variable) in enumerate(zip(found, variables, strict=True)):
        wanted: Sequence[Any] = [s for s in parts(variable) if s.size() > 1]
        if square is not None and wanted:
            key = tuple(tuple(s.ranks) for s in wanted)
            over.setdefault(key, (wanted, []))[1].append(place)
    # Named by number: of the ranks of one set each may have further sets of its own.
    for number, (wanted, places) in enumerate(over.values()):
        # One small collective for all variables that lie over the same ranks.
        together = tf.stack([found[place] for place in places])
        total = _added(together, wanted, f"{name}_{number}")
        for place, square in zip(places, tf.unstack(total, num=len(places)), strict=True):
            found[place] = square
    return found


def clip_by_norm(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    limit: float,
    together: bool,
    parts: Parts,
    rest: Sequence[Communicator],
    name: str,
) -> list[Any]:
    """Return `gradients`, shortened as Keras's clipnorm or global_clipnorm shortens whole gradients. A collective.

    Args:
        gradients, variables, parts, name: see `squared_norms`.
        limit: the largest norm that is left alone.
        together: clip by the norm of all gradients (global_clipnorm), not each by its own (clipnorm).
        rest: the groups of ranks over which the model's other variables lie.
    """
    squares = squared_norms(gradients, variables, parts, name)
    if not together:
        return [
            g if square is None else _times(g, limit / tf.maximum(tf.sqrt(square), limit))
            for g, square in zip(gradients, squares, strict=True)
        ]
    own = [square for square in squares if square is not None]
    total = tf.add_n(own) if own else tf.constant(0.0)
    norm = tf.sqrt(_added(total, [s for s in rest if s.size() > 1], f"{name}_rest"))
    # As Keras: an inf or nan makes all gradients nan, rather than 0.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    # As Keras, where slices become dense here, but not above: Adam squares slices of one index each.
    return [None if g is None else _times(tf.convert_to_tensor(g), scale) for g in gradients]


def _square(gradient: Any) -> tf.Tensor:
    # As Keras: each slice counts alone, also where several have one index.
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _times(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _added(values: tf.Tensor, sets: Sequence[Communicator], name: str) -> tf.Tensor:
    for number, ranks in enumerate(sets):
        values = ranks.allreduce(values, f"{name}_{number}")
    return values
