"""The communicator between threads, and what it does where a rank is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import communication
import pytest
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

from hvdtrain.collectives.communicator import Average, Communicator
from hvdtrain.errors import EngineError, UsageError


def values(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns on each rank; none fails."""
    found = run_ranks(thread_ranks(size), work)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_every_dtype_comes_back_as_numpy_computes_it(size: int) -> None:
    assert values(size, communication.wrong) == [[]] * size


def test_complex_numbers_are_scaled_where_a_rank_is_alone() -> None:
    def scaled(ranks: Communicator) -> Any:
        return complex(ranks.allreduce(tf.constant(1 + 2j), "c", prescale_factor=2.0).numpy())

    assert values(1, scaled) == [2 + 4j]


def test_a_constant_is_not_reduced_ahead() -> None:
    assert values(2, communication.of_constants) == [[12.0, 23.0]] * 2


def test_exchange_brings_values_as_they_were() -> None:
    def work(ranks: Communicator) -> Any:
        return ranks.exchange({"rank": ranks.rank(), "texts": ("ä",) * ranks.rank()}, "x")

    everyone = [{"rank": rank, "texts": ("ä",) * rank} for rank in range(3)]
    assert values(3, work) == [everyone] * 3


def test_what_one_rank_cannot_send_is_refused_on_all() -> None:
    mine = [1, object()]
    for error in run_ranks(
        thread_ranks(2), lambda ranks: ranks.exchange(mine[ranks.rank()], "facts")
    ):
        assert isinstance(error, UsageError)
        assert "facts: rank 1 cannot send this to the other ranks" in str(error)


def test_a_subset_is_counted_from_its_own_first_rank() -> None:
    def work(ranks: ThreadRanks) -> Any:
        part = ranks.subset([1, 3] if ranks.rank() % 2 else [0, 2])
        mean = part.allreduce(float(ranks.rank()), "mean", Average)
        whole = ranks.allgather([part.rank()], "places")
        root = part.broadcast(ranks.rank(), part.ranks[1], "root")
        return float(mean), whole.numpy().tolist(), int(root)

    odd, even = (2.0, [0, 0, 1, 1], 3), (1.0, [0, 0, 1, 1], 2)
    assert values(4, work) == [even, odd, even, odd]


def test_a_rank_that_has_ended_is_named_to_those_that_wait() -> None:
    def work(ranks: Communicator) -> None:
        if ranks.rank() == 1:
            raise UsageError("no")
        ranks.allgather([1], "late")

    first, second = run_ranks(thread_ranks(2), work)
    assert isinstance(first, EngineError) and "late: rank 1 ended before" in str(first)
    assert isinstance(second, UsageError)


def test_ranks_in_different_collectives_are_told_so() -> None:
    for error in run_ranks(
        thread_ranks(2), lambda ranks: ranks.allgather([1], "for_" + "ab"[ranks.rank()])
    ):
        assert isinstance(error, EngineError)
        assert "{0: 'for_a', 1: 'for_b'}" in str(error)


class _Growing(ThreadRanks):
    def _may_grow(self) -> bool:
        return True


def test_a_rank_alone_asks_nobody_unless_others_may_come() -> None:
    asked = []

    class Counting(_Growing):
        def _allreduce(self, wire: tf.Tensor, *args: Any) -> tf.Tensor:
            asked.append(tf.executing_eagerly())
            return super()._allreduce(wire, *args)

    def work(ranks: ThreadRanks) -> list[float]:
        growing = Counting(ranks.job, ranks.job_rank, ranks.members)
        eager = growing.allreduce(3.0, "x", Average, 0.5)
        traced = tf.function(lambda: growing.allreduce(3.0, "x", Average, 0.5))()
        return [float(eager), float(traced)]

    assert values(1, work) == [[1.5, 1.5]]
    assert asked == [False]  # in the graph, which outlives this size
