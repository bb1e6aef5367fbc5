"""The hosts of an elastic job: who touches their agents when."""

from __future__ import annotations

import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.start.parts import elastic_hosts
from hvdtrain.start.parts.agents import Agents, SshSettings
from hvdtrain.start.parts.elastic_hosts import ElasticAgents, ElasticHosts
from hvdtrain.start.parts.horovod_launcher import _too_long


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
    stand_in = ElasticAgents("id", SshSettings(sys.executable, {}, None, None, 5))
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


def test_a_host_that_no_command_could_start_ranks_on_is_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in = ElasticAgents("id", SshSettings(sys.executable, {}, None, None, 5))
    with ElasticHosts(stand_in, {}, None, 5, unfit="too many variables") as hosts:
        assert hosts.fit({"192.0.2.1": 2, "localhost": 1}) == {"localhost": 1}
    os.close(stand_in._orders)
    said = capfd.readouterr().err
    assert "host 192.0.2.1: too many variables" in said
    assert "host 192.0.2.1 is skipped until it can run workers" in said


def test_variables_that_do_not_fit_into_a_command_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = Namespace(use_gloo=True)
    assert _too_long(arguments, ()) == ""
    monkeypatch.setenv("PYTHON_A", "a" * 50_000)
    monkeypatch.setenv("PYTHON_B", "b" * 60_000)
    assert "or shorten the longest, PYTHON_B (60008 bytes)" in _too_long(arguments, ())
    assert _too_long(Namespace(use_gloo=False), ()) == "", "mpirun sends the values itself"
