"""The hosts of an elastic job: who touches their agents when."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.start.parts import elastic_hosts
from hvdtrain.start.parts.agents import Agents, Reach
from hvdtrain.start.parts.elastic_hosts import ElasticAgents, ElasticHosts


class Slow(Agents):
    """Agents whose news take a while to read; `ended_while_read` if somebody ended them meanwhile."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.reading = threading.Event()
        self.ended_while_read = False

    def news(self, seconds: float) -> Iterator[Any]:
        self.reading.set()
        time.sleep(0.3)
        self.reading.clear()
        yield from ()

    def __exit__(self, *exception: object) -> None:
        self.ended_while_read = self.reading.is_set()
        super().__exit__()


def test_a_host_that_leaves_is_not_read_while_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that read one pipe: the one that beats for all hosts would fail."""
    monkeypatch.setattr(elastic_hosts, "TICK_SECONDS", 0.01)
    stand_in = ElasticAgents("id", Reach(sys.executable, {}, None, None, 5))
    agents = Slow()
    with ElasticHosts(stand_in, {}, None, 5) as hosts:
        hosts._agents["a"] = agents
        assert agents.reading.wait(10)
        hosts.fit({})
        deadline = time.monotonic() + 10
        while not agents._over.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert agents._over.is_set()
        assert not agents.ended_while_read
    os.close(stand_in._orders)
