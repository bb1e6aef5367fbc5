"""Gradient clipping by norm when a rank holds only parts of the gradients.

A norm is that of a whole variable, or of all variables of the model: squares are summed over the ranks that hold the
parts, however the model is divided (split layers, sharded optimizer state, pipeline stages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.reduction import scaled

Parts: TypeAlias = Callable[[Any], Sequence[Communicator]]
"""Returns the groups of ranks over which a variable is split; none if this rank holds all of it."""


def squared_norms(
    gradients: Sequence[Any], variables: Sequence[Any], parts: Parts, name: str
) -> list[tf.Tensor | None]:
    """Return the squared norm of each whole gradient, a float32 scalar, or None for None. A collective.

    Args:
        gradients: This rank's parts of the gradients: a tensor, IndexedSlices or None for each variable.
        variables: Variables that the gradients are for.
        parts: Returns the groups of ranks over which a variable is split.
        name: First part of the collectives' names.
    """
    found: list[tf.Tensor | None] = [None if g is None else _square(g) for g in gradients]
    over: dict[tuple[tuple[int, ...], ...], tuple[Sequence[Communicator], list[int]]] = {}
    for place, (square, variable) in enumerate(zip(found, variables, strict=True)):
        wanted: Sequence[Any] = [s for s in parts(variable) if s.size() > 1]
        if square is not None and wanted:
            key = tuple(tuple(s.ranks) for s in wanted)
            over.setdefault(key, (wanted, []))[1].append(place)
    # Numbered, not named by ranks: the ranks of one set may differ in their further sets.
    for number, (wanted, places) in enumerate(over.values()):
        # One small collective for all variables that are split over the same ranks.
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
    """Return `gradients`, clipped as Keras's clipnorm or global_clipnorm clips whole gradients. A collective.

    Args:
        gradients, variables, parts, name: As in `squared_norms`.
        limit: Largest norm that is not clipped.
        together: Clip by the norm of all gradients (global_clipnorm), not each by its own (clipnorm).
        rest: Groups of ranks that hold the other variables of the model.
    """
    squares = squared_norms(gradients, variables, parts, name)
    if not together:
        return [
            g if square is None else scaled(g, limit / tf.maximum(tf.sqrt(square), limit))
            for g, square in zip(gradients, squares, strict=True)
        ]
    own = [square for square in squares if square is not None]
    total = tf.add_n(own) if own else tf.constant(0.0)
    norm = tf.sqrt(_added(total, [s for s in rest if s.size() > 1], f"{name}_rest"))
    # As in Keras: an inf or nan makes all gradients nan, rather than 0.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    # As in Keras, slices become dense with global_clipnorm, but not with clipnorm: Adam squares each slice.
    return [None if g is None else scaled(tf.convert_to_tensor(g), scale) for g in gradients]


def _square(gradient: Any) -> tf.Tensor:
    # As in Keras: each slice counts by itself, even if several have the same index.
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _added(values: tf.Tensor, sets: Sequence[Communicator], name: str) -> tf.Tensor:
    for number, ranks in enumerate(sets):
        values = ranks.allreduce(values, f"{name}_{number}")
    return values
