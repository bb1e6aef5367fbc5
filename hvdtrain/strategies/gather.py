"""Gather the predictions of all ranks in the order of the examples.

The result is that of Keras's predict on the whole batches: one array for each output, a ragged tensor where batches
differ in an inner dimension, and arrays of bytes for strings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.data import Share
from hvdtrain.errors import UsageError


def gather_predictions(
    outputs: Iterable[tuple[Share, Any]], ranks: Communicator = ALL_RANKS
) -> Any:
    """Return the outputs for the examples of all ranks. A collective, with two operations per output.

    Args:
        outputs: Share of each step, with this rank's output for it: a tensor, or a structure of tensors, whose leading
            dimension is that of the share's data (one filler example on an idle rank).
        ranks: Ranks that hold the shares.

    Returns:
        NumPy arrays of shape (examples, ...) in the structure of the outputs; a tf.RaggedTensor for an output
        whose inner dimensions differ between batches.

    Raises:
        UsageError: On all ranks: there are no batches.
    """
    steps: list[list[np.ndarray]] = []
    begins: list[int] = []
    begin = 0
    structure: Any = None
    for share, output in outputs:
        structure = output
        steps.append([np.asarray(leaf)[: share.examples] for leaf in tf.nest.flatten(output)])
        begins.append(begin + share.offset)
        begin += share.global_examples
    if structure is None:
        raise UsageError("The data has no batches: nothing to predict")
    joined = [
        _join(_gathered(parts, begins, f"hvdtrain_predictions_{index}", ranks))
        for index, parts in enumerate(zip(*steps, strict=True))
    ]
    return tf.nest.pack_sequence_as(structure, joined)


def _gathered(
    steps: Sequence[np.ndarray], begins: Sequence[int], name: str, ranks: Communicator
) -> list[np.ndarray]:
    """Return every rank's part of every step in the order of the examples, without those of idle ranks."""
    own = [(begin, *part.shape) for begin, part in zip(begins, steps, strict=True)]
    places = ranks.allgather(np.array(own), f"{name}_places").numpy()
    flat = _values(np.concatenate([part.reshape(-1) for part in steps]), name, ranks)
    shapes = places[:, 1:].tolist()
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    pieces = np.split(flat, ends[:-1])
    parts = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    order = np.argsort(places[:, 0], kind="stable")
    return [parts[index] for index in order if len(parts[index])]


def _values(own: np.ndarray, name: str, ranks: Communicator) -> np.ndarray:
    if own.dtype.hasobject:
        return np.concatenate(
            [np.array(texts, object) for texts in ranks.exchange(own.tolist(), name)]
        )
    # On the CPU: an accelerator may have no room for it.
    with tf.device("CPU:0"):
        return ranks.allgather(own, name).numpy()


def _join(parts: Sequence[np.ndarray]) -> Any:
    """Join parts of shape (examples, ...) into one array or one ragged tensor."""
    inner = np.array([part.shape[1:] for part in parts])
    constant = (inner == inner[0]).all(axis=0)
    if constant.all():
        return np.concatenate(parts)
    # As in Keras: ragged from the first inner dimension to the last one that differs.
    ragged = int(np.flatnonzero(~constant)[-1]) + 1
    return tf.concat(
        [tf.RaggedTensor.from_tensor(part, ragged_rank=ragged) for part in parts], axis=0
    )
