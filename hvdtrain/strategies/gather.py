"""Predictions of all ranks, put together in the order of the examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.data import Share
from hvdtrain.errors import UsageError


def gather_predictions(
    outputs: Iterable[tuple[Share, Any]], ranks: Communicator = ALL_RANKS
) -> Any:
    """Return the outputs for all examples of all the ranks. A collective for each output.

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
    order = np.argsort(_gathered(np.concatenate(positions), "positions", ranks))
    gathered = [
        _gathered(np.concatenate(leaves), f"output_{index}", ranks)[order]
        for index, leaves in enumerate(zip(*parts, strict=True))
    ]
    return tf.nest.pack_sequence_as(structure, gathered)


def _gathered(rows: np.ndarray, name: str, ranks: Communicator) -> np.ndarray:
    # Not on an accelerator, which need not have room for it.
    with tf.device("CPU:0"):
        return ranks.allgather(rows, f"hvdtrain_predictions_{name}").numpy()
