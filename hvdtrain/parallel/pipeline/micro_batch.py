"""Micro-batches: the parts of a rank's share of the batch that pass through the stages one after another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import Share
from hvdtrain.data.share import split


@dataclass(frozen=True)
class MicroBatch:
    """One part of a share.

    Attributes:
        data: (x, y, sample weight); the last two are None where there are none.
        examples: Number of examples; 1 on an idle rank, whose filler example has weight 0.
        weight: Number of examples divided by that of the global batch.
        size: Key that is equal for micro-batches of equal shapes.
    """

    data: tuple[Any, Any, Any]
    examples: int
    weight: float
    size: Hashable


def micro_batches(share: Share, count: int) -> list[MicroBatch]:
    """Split `share` into at most `count` parts, whose sizes differ by at most one example."""
    examples = max(share.examples, 1)
    count = min(count, examples)
    ends = [split(examples, part, count) for part in range(count)]
    sizes = [end - begin for begin, end in ends]
    structure = keras.utils.unpack_x_y_sample_weight(share.data)
    leaves = [tf.split(leaf, sizes) for leaf in tf.nest.flatten(share.data)]
    shapes = tuple(tuple(parts[0].shape[1:]) for parts in leaves)
    return [
        MicroBatch(
            data=_packed(structure, [parts[number] for parts in leaves]),
            examples=size,
            weight=size * min(share.examples, 1) / share.global_examples,
            size=(size, shapes),
        )
        for number, size in enumerate(sizes)
    ]


def _packed(structure: tuple[Any, Any, Any], leaves: list[Any]) -> tuple[Any, Any, Any]:
    present = [part for part in structure if part is not None]
    packed = iter(tf.nest.pack_sequence_as(present, leaves))
    x, y, weight = (None if part is None else next(packed) for part in structure)
    return x, y, weight
