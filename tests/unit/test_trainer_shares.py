"""The shares of ranks that are threads: data that the user divided, and data that differs."""

import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.data import Part, ShardedSource, make_source, split
from hvdtrain.errors import ReplicaError
from hvdtrain.trainer.shares import epoch_shares


def on_ranks(sources):
    """Each rank's shares of an epoch."""
    size = len(sources)

    def read(ranks):
        part = Part(ranks.rank(), size)
        return list(epoch_shares(sources[part.index], 0, part, ranks))

    found = run_ranks(thread_ranks(size), read)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def own_parts(lengths, batch, steps=None, kind=lambda x: x):
    """Each rank's part of the numbers 0, 1, ..., that many of them."""
    ends = np.cumsum(lengths)
    sources = []
    for rank, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        begin, stop = split(batch, rank, len(lengths))
        own = make_source(
            kind(np.arange(end - length, end)),
            global_batch_size=stop - begin,
            shuffle=False,
            seed=0,
            steps_per_epoch=steps,
        )
        sources.append(ShardedSource(own, steps))
    return sources


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: tf.data.Dataset.from_tensor_slices(x)])
@pytest.mark.parametrize(("lengths", "batch"), [([10], 4), ([9, 4], 4), ([2, 7, 5], 7)])
def test_every_example_of_uneven_parts_counts_once(lengths, batch, kind):
    ranks = on_ranks(own_parts(lengths, batch, kind=kind))
    seen = []
    for shares in zip(*ranks, strict=True):  # As many steps on every rank.
        total = sum(share.examples for share in shares)
        assert {share.global_examples for share in shares} == {total} and total
        for rank, share in enumerate(shares):
            assert share.offset == sum(other.examples for other in shares[:rank])
            # An idle rank has an example to run with.
            assert share.data.shape[0] == max(share.examples, 1)
            seen += share.data.numpy()[: share.examples].tolist()
    assert sorted(seen) == list(range(sum(lengths)))


def test_steps_of_own_parts():
    sources = own_parts([9, 4], 4, steps=3)
    assert sources[0].steps_per_epoch == 3
    with pytest.warns(UserWarning, match="the data ran out: the epoch ends after 2 of 3 steps"):
        ranks = on_ranks(sources)
    assert [[share.examples for share in shares] for shares in ranks] == [[2, 2, 2], [2, 2, 0]]


def streams(*orders, **options):
    """Sources that give each of `orders` in batches of up to 4."""
    return [
        make_source(
            lambda order=order: iter(np.split(np.array(order), range(4, len(order), 4))),
            global_batch_size=min(4, len(order)),
            shuffle=False,
            seed=0,
            **options,
        )
        for order in orders
    ]


def test_streams_that_differ_stop_all_ranks():
    same = on_ranks(streams([1, 2, 3, 4], [1, 2, 3, 4]))
    assert [share.data.numpy().tolist() for (share,) in same] == [[1, 2], [3, 4]]
    with pytest.raises(ReplicaError, match="batch of step 1 on rank 1 differs from that of rank 0"):
        on_ranks(streams([1, 2, 3, 4], [1, 2, 4, 3]))
    with pytest.raises(ReplicaError, match="has 4 examples on rank 0 and 3 on rank 1"):
        on_ranks(streams([1, 2, 3, 4], [1, 2, 3]))


def test_streams_that_differ_later_stop_all_ranks_before_that_step():
    # Agreement is sought for 1, 2, 4, 8, 16, 16 steps at once.
    whole = list(range(4 * 50))
    same = on_ranks(streams(whole, whole))
    assert [len(shares) for shares in same] == [50, 50]
    assert (
        np.concatenate([s.data for both in zip(*same, strict=True) for s in both]).tolist() == whole
    )
    changed = [*whole[:-1], 0]
    with pytest.raises(
        ReplicaError, match="batch of step 50 on rank 1 differs from that of rank 0"
    ):
        on_ranks(streams(whole, changed))
    with pytest.raises(ReplicaError, match="rank 1 ended after 21 steps, while rank 0 has more"):
        on_ranks(streams(whole, whole[: 4 * 21]))


def test_few_large_shares_are_read_ahead():
    read = []

    def batches():
        for number in range(20):
            read.append(number)
            yield np.zeros((2, 2**20), np.float32)  # 8 MB

    source = make_source(batches, global_batch_size=2, shuffle=False, seed=0)
    ranks = thread_ranks(2)
    shares = run_ranks(
        ranks, lambda r: (s := epoch_shares(source, 0, Part(r.rank(), 2), r), next(s))
    )
    assert len(shares) == 2 and len(read) < 20
