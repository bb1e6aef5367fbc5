"""Ranks that are threads of one process, for what the state of a training needs of Horovod."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from hvdtrain.collectives import accumulated, agreement
from hvdtrain.collectives.encoding import decode, encode
from hvdtrain.errors import UsageError
from hvdtrain.parallel import state as travel
from hvdtrain.parallel.zero import reducer


class _Group:
    """Ranks that meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.said: list[Any] = [None] * size


class Ranks:
    """Horovod between threads; a collective of another name on one rank fails them all."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self._local = threading.local()
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._lock = threading.Lock()
        horovod = SimpleNamespace(
            rank=self.rank,
            size=lambda: size,
            broadcast=self._broadcast,
            allgather=self._allgather,
            allreduce=self._allreduce,
            Sum=hvd.Sum,
            Average=hvd.Average,
        )
        for module in (travel, accumulated, reducer):
            monkeypatch.setattr(module, "hvd", horovod)
        monkeypatch.setattr(travel, "exchange", self._exchange)
        monkeypatch.setattr(agreement, "exchange", self._exchange)

    def rank(self) -> int:
        return int(self._local.rank)

    def _all(self, value: Any, name: str, ranks: Sequence[int] = ()) -> list[Any]:
        """What the ranks (default: all) say under one name, in their order."""
        key = tuple(ranks) or tuple(range(self.size))
        with self._lock:
            group = self._groups.setdefault(key, _Group(len(key)))
        group.said[key.index(self.rank())] = (name, value)
        group.barrier.wait()
        said = list(group.said)
        group.barrier.wait()
        assert {other for other, _ in said} == {name}, said
        return [value for _, value in said]

    def _broadcast(self, tensor: Any, root: int, name: str) -> Any:
        everyone = self._all(tensor, name)
        assert len({tuple(t.shape) for t in everyone}) == 1
        return everyone[root]

    def _allgather(self, tensor: Any, name: str, process_set: Any, **_: Any) -> Any:
        # Optimizers are numbered by process, and these ranks are one.
        common = re.sub(r"_\d+_whole", "_whole", name)
        return tf.concat(self._all(tensor, common, process_set.ranks), axis=0)

    def _allreduce(self, tensor: Any, op: Any, name: str, process_set: Any) -> Any:
        total = tf.add_n(self._all(tensor, name, process_set.ranks))
        return total if op == hvd.Sum else total / process_set.size()

    def _exchange(self, value: Any, name: str) -> list[Any]:
        return [decode(encode(v)) for v in self._all(value, name)]

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what `work` returns, or raises, on each rank."""
        results: list[Any] = [None] * self.size

        def start(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error
                if not isinstance(error, UsageError):
                    for group in list(self._groups.values()):
                        group.barrier.abort()

        threads = [threading.Thread(target=start, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
