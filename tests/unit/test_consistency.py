"""An error on one rank is one on all, between threads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.collectives import first_rank
from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.consistency import raise_alike
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.errors import EngineError, UsageError

NO_FOLDER = tf.errors.NotFoundError(None, None, "{{function_node x}} no folder; no such file")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("give another path"), "give another path"),
        (PermissionError(13, "Permission denied"), "save: [Errno 13] Permission denied"),
        (NO_FOLDER, "save: no folder; no such file"),
    ],
)
def test_what_a_user_can_mend_is_said_alike(error: Exception, said: str) -> None:
    def work(ranks: Communicator) -> None:
        raise_alike(error if ranks.rank() == 1 else None, "save", ranks)

    found = run_ranks(thread_ranks(3), work)
    assert [(type(each), str(each)) for each in found] == [(UsageError, said)] * 3


def test_any_other_error_stays_what_it_is_where_it_happened() -> None:
    def work(ranks: Communicator) -> None:
        raise_alike(KeyError("loss") if ranks.rank() == 1 else None, "callback X", ranks)

    first, second = run_ranks(thread_ranks(2), work)
    assert isinstance(second, KeyError)
    assert isinstance(first, EngineError)
    assert str(first) == "Rank 1 failed: callback X: KeyError('loss')"


def test_the_first_ones_work_is_done_once() -> None:
    done: list[int] = []

    def work(ranks: Communicator) -> Any:
        return on_first(lambda: done.append(ranks.rank()) or "text", "load", ranks)  # type: ignore[func-returns-value]

    assert run_ranks(thread_ranks(2), work) == ["text"] * 2
    assert done == [0]


def test_the_first_ones_failure_is_everyones() -> None:
    def work(ranks: Communicator) -> None:
        on_first(Path("/nowhere/at/all").read_text, "load", ranks)

    for error in run_ranks(thread_ranks(2), work):
        assert isinstance(error, UsageError)
        assert str(error) == "load: [Errno 2] No such file or directory: '/nowhere/at/all'"


@pytest.mark.parametrize(("limit", "reports"), [("0", range(8, 99)), ("0.3", range(1, 7))])
def test_the_first_one_reports_until_it_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch, limit: str, reports: range
) -> None:
    """Every 0.05 s of 1 s, on any machine far from the limits; 0: no limit."""
    monkeypatch.setattr(first_rank, "NEWS_SECONDS", 0.05)
    monkeypatch.setenv("HVDTRAIN_HANG_TIMEOUT", limit)
    heard: list[Any] = []
    exchange = Communicator.exchange

    def hear(ranks: Communicator, value: Any, name: str) -> list[Any]:
        everyone = exchange(ranks, value, name)
        heard.append(everyone[0] if ranks.rank() else None)
        return everyone

    monkeypatch.setattr(Communicator, "exchange", hear)
    run_ranks(
        thread_ranks(2), lambda ranks: on_first(lambda: time.sleep(1) or "text", "save", ranks)
    )
    assert heard.count("busy") in reports and heard.count("text") == 1
