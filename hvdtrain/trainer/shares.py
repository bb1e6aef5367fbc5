"""The shares of an epoch as tensors: prefetched, and compared over the ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Min
from hvdtrain.data import KnownSource, Part, ShardedSource, Share, Source, prefetch
from hvdtrain.errors import ReplicaError

MOST_AHEAD = 16
"""Maximum number of shares of a stream that are prefetched, and compared over the ranks at once, ..."""

BYTES_AHEAD = 1 << 24
"""... as long as they fit into this many bytes."""


def epoch_shares(
    source: Source, epoch: int, part: Part, ranks: Communicator = ALL_RANKS, skip: int = 0
) -> Iterator[Share]:
    """Yield this process's shares of one epoch, as tensors, made in another thread.

    Args:
        source: Data to read.
        epoch: Index of the epoch, from 0.
        part: Share of each global batch that this process reads.
        ranks: Ranks that read the data together.
        skip: Number of steps to leave out at the beginning, if the source can do so without reading them.

    Raises:
        ReplicaError: If a rank's stream has another batch, or another number of batches, than that of rank 0.
    """
    if isinstance(source, KnownSource):
        found = source.epoch(epoch, part.index, part.count, skip)
    else:
        found = source.epoch(epoch, part.index, part.count)
    shares = _with_tensors(found)
    if ranks.size() == 1:
        return prefetch(shares)
    if isinstance(source, ShardedSource):
        return _counted(prefetch(shares), ranks)
    return _compared(prefetch(shares), ranks) if source.agreed else _agreed(shares, ranks)


def checksum_of(shares: Iterable[Share], before: int = 0) -> int:
    """Return a checksum of the batches of `shares`, continuing the checksum `before`."""
    for share in shares:
        before = zlib.crc32(str([share.global_examples, share.checksum]).encode(), before)
    return before


def grouped(shares: Iterable[Share], count: int) -> Iterator[list[Share]]:
    """Yield lists of consecutive shares that can run together: equal shapes, and no idle rank.

    All `count` ranks that share the data group alike, whether or not they are idle themselves.
    """
    group: list[Share] = []
    for share in shares:
        alike = group and _shapes(share) == _shapes(group[0])
        if group and not (alike and share.global_examples >= count):
            yield group
            group = []
        group.append(share)
    if group:
        yield group


def _shapes(share: Share) -> list[Any]:
    leaves = tf.nest.flatten(share.data)
    return [share.examples, share.global_examples, *(tuple(leaf.shape) for leaf in leaves)]


def _with_tensors(shares: Iterator[Share]) -> Generator[Share, None, None]:
    for share in shares:
        yield replace(share, data=tf.nest.map_structure(tf.convert_to_tensor, share.data))


def _agreed(shares: Generator[Share, None, None], ranks: Communicator) -> Iterator[Share]:
    """Start a step of a stream only when all ranks have the same batch for it.

    A comparison takes about 1 ms, so it covers 1, 2, 4, ... steps at once, up to the number of prefetched shares.
    """
    first = next(shares, None)
    # The minimum, as the ranks' shares differ in size.
    most = int(ranks.allreduce(_fitting(first), "hvdtrain_ahead", Min))
    ahead = prefetch(_from(first, shares), max(most, 2))
    step, count = 0, 1
    while True:
        found = list(itertools.islice(ahead, count))
        _require_same(found, step, count, ranks)
        yield from found
        if len(found) < count:
            return
        step, count = step + count, min(2 * count, most)


def _fitting(share: Share | None) -> int:
    """Return how many shares like this one to prefetch."""
    if share is None:
        return MOST_AHEAD
    leaves = tf.nest.flatten(share.data)
    size = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in leaves)
    return max(1, min(MOST_AHEAD, BYTES_AHEAD // max(1, size)))


def _from(
    first: Share | None, others: Generator[Share, None, None]
) -> Generator[Share, None, None]:
    if first is not None:
        yield first
    yield from others


def _compared(shares: Iterator[Share], ranks: Communicator) -> Iterator[Share]:
    """Compare the batches of data of known length that have a checksum: the same few steps on each rank."""
    for step, share in enumerate(shares):
        if share.checksum is not None:
            _require_same([share], step, 1, ranks)
        yield share


def _counted(shares: Iterator[Share], ranks: Communicator) -> Iterator[Share]:
    """Count the examples that each rank brings to a step; a rank whose data has ended continues as idle."""
    last: Share | None = None
    while True:
        share = next(shares, None)
        own = 0 if share is None else share.examples
        counts = ranks.allgather(np.array([own]), "hvdtrain_counts").numpy()
        if not counts.any():
            return
        last = share if share is not None else last
        assert last is not None, "a source without a batch is an error of its own"
        data = last.data if own else tf.nest.map_structure(_filler, last.data)
        offset = int(counts[: ranks.rank()].sum())
        yield replace(
            last,
            data=data,
            examples=own,
            global_examples=int(counts.sum()),
            offset=offset,
            some_idle=not counts.all(),
        )


def _filler(leaf: tf.Tensor) -> tf.Tensor:
    """Return an example of an earlier step for a step that has none, with 0 for nan and inf: 0 times nan is nan."""
    first = leaf[:1]
    if not leaf.dtype.is_floating:
        return first
    return tf.where(tf.math.is_finite(first), first, tf.zeros_like(first))


def _require_same(shares: Sequence[Share], step: int, count: int, ranks: Communicator) -> None:
    """Raise ReplicaError unless all ranks have the same batches for `count` steps from `step` on. A collective."""
    mine = np.zeros((count, 3), np.int64)
    for row, share in zip(mine, shares, strict=False):
        row[:] = 1, share.global_examples, (share.checksum or 0) % 2**62
    gathered = ranks.allgather(mine, "hvdtrain_stream").numpy()
    everyone = gathered.reshape(ranks.size(), count, 3).swapaxes(0, 1)
    for number, rows in enumerate(everyone, step):
        differing = np.flatnonzero((rows != rows[0]).any(axis=1))
        if differing.size:
            raise ReplicaError(_stream_message(rows, int(differing[0]), number))


def _stream_message(everyone: Any, other: int, step: int) -> str:
    (has, count, _), (other_has, other_count, _) = everyone[0], everyone[other]
    if has != other_has:
        ended, going = (0, other) if not has else (other, 0)
        what = f"the data of rank {ended} ended after {step} steps, while rank {going} has more"
    elif count != other_count:
        what = f"the batch of step {step + 1} has {count} examples on rank 0 and {other_count} on rank {other}"
    else:
        what = f"the batch of step {step + 1} on rank {other} differs from that of rank 0"
    return (
        f"The ranks read different data: {what}. Every rank must read the same data; hvdtrain gives each rank "
        "its share. Call hvdtrain.init(seed=1) before the data is created, or shuffle with a seed "
        "(Dataset.shuffle(..., seed=1)). Put maps with random numbers after hvdtrain.data.shard, and pass "
        "sharded=True if you divide the data yourself."
    )
