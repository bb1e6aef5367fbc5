"""Predictions of all ranks, put together in the order of the examples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.data import Share
from hvdtrain.errors import UsageError


def gather_predictions(
    outputs: Iterable[tuple[Share, Any]], process_set: hvd.ProcessSet = hvd.global_process_set
) -> Any:
    """Return the outputs for all examples of all ranks of `process_set`. A collective for each output.

    Args:
        outputs: each step's share and this rank's output for it: a tensor, or a structure of them,
            whose leading dimension is the share's examples (one filler on an idle rank).

    Returns:
        NumPy arrays of (examples, ...) in the structure of the outputs.
    """
    parts: list[list[np.ndarray]] = []
    positions: list[np.ndarray] = []
    structure: Any = None
    begin = 0
    for share, output in outputs:
        structure = output
        leaves = [np.asarray(leaf)[: share.examples] for leaf in tf.nest.flatten(output)]
        parts.append(leaves)
        positions.append(begin + share.offset + np.arange(share.examples))
        begin += share.global_examples
    if structure is None:
        raise UsageError("The data holds no batch: nothing to predict")
    order = np.argsort(_gathered(np.concatenate(positions), "positions", process_set))
    gathered = [
        _gathered(np.concatenate(leaves), f"output_{index}", process_set)[order]
        for index, leaves in enumerate(zip(*parts, strict=True))
    ]
    return tf.nest.pack_sequence_as(structure, gathered)


def _gathered(rows: np.ndarray, name: str, process_set: hvd.ProcessSet) -> np.ndarray:
    if process_set.size() == 1:
        return rows
    # As bytes: Horovod does not know every type, bfloat16 for one.
    width = rows.dtype.itemsize * math.prod(rows.shape[1:])
    bits = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), width)
    gathered = hvd.allgather(
        tf.constant(bits), name=f"hvdtrain_predictions_{name}", process_set=process_set
    )
    return gathered.numpy().view(rows.dtype).reshape(-1, *rows.shape[1:])
