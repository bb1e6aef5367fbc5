"""Ranks that are threads of one process, for tests that need several ranks but neither a launch nor Horovod.

    def work(ranks: ThreadRanks) -> Any:
        return ranks.allreduce(tf.constant(1.0), "votes").numpy()

    assert run_ranks(thread_ranks(4), work) == [4.0] * 4

Ranks must call the same collectives in the same order. If they do not, or if one has ended, the others get an
EngineError at once. Collectives also work in a tf.function, as long as TensorFlow has a thread for each that waits.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator, Max, Min, Sum
from hvdtrain.errors import EngineError

SECONDS = 30.0
"""Time after which a rank that has not called a collective is considered lost."""

_COMBINE = {Sum: np.add, Average: np.add, Min: np.fmin, Max: np.fmax}
"""As NCCL, whose maximum of nan and 1 is 1."""


@dataclass
class _Job:
    """State that the threads share.

    Attributes:
        size: Number of ranks.
        changed: Condition that guards the other attributes, notified when one of them changes.
        said: (process set, number of the collective) -> rank -> (name, value) that the rank contributed.
        calls: (process set, rank) -> number of collectives that the rank has begun.
        ended: Ranks that have returned or failed.
    """

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    said: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, Any]]] = field(
        default_factory=dict
    )
    calls: Counter[tuple[tuple[int, ...], int]] = field(default_factory=Counter)
    ended: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ThreadRanks(Communicator):
    """Communicator of one rank that is a thread; created by `thread_ranks` and `subset`.

    Attributes:
        job: State that the threads share.
        job_rank: This rank.
        members: Ranks of the process set.
    """

    job: _Job
    job_rank: int
    members: tuple[int, ...]

    def subset(self, ranks: Sequence[int]) -> ThreadRanks:
        """Return the process set of `ranks`, which include this one."""
        return replace(self, members=tuple(sorted(ranks)))

    def rank(self) -> int:
        return self.members.index(self.job_rank)

    def size(self) -> int:
        return len(self.members)

    @property
    def ranks(self) -> list[int]:
        return list(self.members)

    def is_global(self) -> bool:
        return self.size() == self.job.size

    def _allreduce(
        self, wire: tf.Tensor, name: str, op: Any, prescale: float, postscale: float
    ) -> tf.Tensor:
        return self._run(lambda x: self._reduced(x, name, op, prescale, postscale), wire)

    def _reducescatter(self, wire: tf.Tensor, name: str, op: Any, postscale: float) -> tf.Tensor:
        def part(x: np.ndarray) -> np.ndarray:
            whole = self._reduced(x, name, op, 1.0, postscale)
            return np.array_split(whole, self.size())[self.rank()]

        return self._run(part, wire)

    def _allgather(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        return self._run(lambda x: np.concatenate(self._meet(name, x)), wire)

    def _broadcast(self, wire: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._run(lambda x: self._meet(name, x)[self.members.index(root)], wire)

    def _alltoall(self, wire: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        def received(x: np.ndarray, splits: np.ndarray) -> np.ndarray:
            sent = self._meet(name, np.split(x, np.cumsum(splits)[:-1]))
            return np.concatenate([parts[self.rank()] for parts in sent])

        return self._run(received, wire, splits)

    def _run(self, work: Callable[..., np.ndarray], wire: tf.Tensor, *further: Any) -> tf.Tensor:
        return tf.numpy_function(work, [wire, *further], wire.dtype)

    def _reduced(
        self, mine: np.ndarray, name: str, op: Any, prescale: float, postscale: float
    ) -> np.ndarray:
        everyone = [_scaled(value, prescale) for value in self._meet(name, mine)]
        if op == Average:
            postscale /= self.size()
        return _scaled(functools.reduce(_COMBINE[op], everyone), postscale)

    def _meet(self, name: str, value: Any) -> list[Any]:
        """Return the values that the ranks of the set contribute to this collective, in their order."""
        job = self.job
        with job.changed:
            job.calls[self.members, self.job_rank] += 1
            call = (self.members, job.calls[self.members, self.job_rank])
            said = job.said.setdefault(call, {})
            said[self.job_rank] = (name, value)
            job.changed.notify_all()
            come = job.changed.wait_for(lambda: self._is_settled(said), SECONDS)
            missing = [rank for rank in self.members if rank not in said]
            if missing:
                why = "ended before it" if come else f"did not call it within {SECONDS:g} s"
                raise EngineError(f"{name}: rank {missing[0]} {why}")
            # Optimizers and layers are numbered per process, and these ranks share one.
            if len({re.sub(r"\d+", "", other) for other, _ in said.values()}) > 1:
                names = {rank: other for rank, (other, _) in sorted(said.items())}
                raise EngineError(f"The ranks are in different collectives: {names}")
            return [said[rank][1] for rank in self.members]

    def _is_settled(self, said: dict[int, Any]) -> bool:
        missing = [rank for rank in self.members if rank not in said]
        return not missing or any(rank in self.job.ended for rank in missing)


def thread_ranks(size: int) -> list[ThreadRanks]:
    """Return the ranks of a new job of `size` ranks."""
    job = _Job(size)
    return [ThreadRanks(job, rank, tuple(range(size))) for rank in range(size)]


def run_ranks(everyone: Sequence[ThreadRanks], work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Run `work` on all ranks of a job; return each rank's result, or the exception that it raised."""
    job = everyone[0].job
    job.ended.clear()
    results: list[Any] = [None] * len(everyone)

    def start(ranks: ThreadRanks) -> None:
        try:
            results[ranks.job_rank] = work(ranks)
        except Exception as error:
            results[ranks.job_rank] = error
        finally:
            with job.changed:
                job.ended.add(ranks.job_rank)
                job.changed.notify_all()

    threads = [threading.Thread(target=start, args=(ranks,)) for ranks in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _scaled(value: np.ndarray, factor: float) -> np.ndarray:
    # As Horovod scales integers: in float64, then truncated.
    return value if factor == 1.0 else (value * np.float64(factor)).astype(value.dtype)
