"""The shares of an epoch as the steps want them: read ahead, as tensors, and agreed upon by the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.data import Part, Share, Source, prefetch
from hvdtrain.errors import ReplicaError


def epoch_shares(source: Source, epoch: int, part: Part) -> Iterator[Share]:
    """Yield the shares of one epoch that are `part`, as tensors, made in another thread.

    Raises:
        ReplicaError: a stream brought another batch, or another number of batches, to some rank.
    """
    shares = prefetch(_with_tensors(source.epoch(epoch, part.index, part.count)))
    return shares if source.agreed or ALL_RANKS.size() == 1 else _agreed(shares)


def grouped(shares: Iterator[Share], size: int) -> Iterator[list[Share]]:
    """Yield lists of up to `size` shares that follow each other and hold equally many examples, at least 1."""
    group: list[Share] = []
    for share in shares:
        alike = group and (share.examples, share.global_examples) == (
            group[0].examples,
            group[0].global_examples,
        )
        if group and not (alike and share.examples):
            yield group
            group = []
        group.append(share)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _with_tensors(shares: Iterator[Share]) -> Iterator[Share]:
    for share in shares:
        yield replace(share, data=tf.nest.map_structure(tf.convert_to_tensor, share.data))


def _agreed(shares: Iterator[Share]) -> Iterator[Share]:
    """Let a step begin only when all ranks have the same batch for it: about 1 ms a step, for streams only."""
    step = 0
    while True:
        share = next(shares, None)
        mine = [0, 0, 0] if share is None else [1, share.global_examples, share.checksum % 2**62]
        everyone = ALL_RANKS.allgather(np.array([mine], np.int64), "hvdtrain_stream").numpy()
        differing = np.flatnonzero((everyone != everyone[0]).any(axis=1))
        if differing.size:
            raise ReplicaError(_stream_message(everyone, int(differing[0]), step))
        if share is None:
            return
        yield share
        step += 1


def _stream_message(everyone: Any, other: int, step: int) -> str:
    (has, count, _), (other_has, other_count, _) = everyone[0], everyone[other]
    if has != other_has:
        ended, going = (0, other) if not has else (other, 0)
        what = f"the data of rank {ended} ended after {step} steps, that of rank {going} goes on"
    elif count != other_count:
        what = f"the batch of step {step + 1} has {count} examples on rank 0 and {other_count} on rank {other}"
    else:
        what = f"the batch of step {step + 1} on rank {other} is not that of rank 0"
    return (
        f"The ranks read different data: {what}. Every rank must read the same stream; hvdtrain gives each its "
        "share. Shuffle with a fixed seed (Dataset.shuffle(..., seed=1)) and do not shard the data yourself."
    )
