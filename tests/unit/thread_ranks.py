"""Ranks that are threads of one process, for what the state of a training needs of Horovod."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain import agreement
from hvdtrain.errors import UsageError
from hvdtrain.parallel import state as travel


class Ranks:
    """Horovod between threads; a collective of another name on one rank fails them all."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=30)
        self._said: list[Any] = [None] * size
        monkeypatch.setattr(
            travel,
            "hvd",
            SimpleNamespace(rank=self.rank, size=lambda: size, broadcast=self._broadcast),
        )
        monkeypatch.setattr(travel, "exchange", self._exchange)
        monkeypatch.setattr(agreement, "exchange", self._exchange)

    def rank(self) -> int:
        return int(self._local.rank)

    def _all(self, value: Any, name: str) -> list[Any]:
        self._said[self.rank()] = (name, value)
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        assert {other for other, _ in said} == {name}, said
        return [value for _, value in said]

    def _broadcast(self, tensor: Any, root: int, name: str) -> Any:
        everyone = self._all(tensor, name)
        assert len({tuple(t.shape) for t in everyone}) == 1
        return everyone[root]

    def _exchange(self, value: Any, name: str) -> list[Any]:
        return [json.loads(json.dumps(v)) for v in self._all(value, name)]

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
                    self._barrier.abort()

        threads = [threading.Thread(target=start, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
