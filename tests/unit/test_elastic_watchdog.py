"""Whom the ranks of an elastic job wait for, which come and go and change their numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from seen_ranks import LIMITS, rank

from hvdtrain.launch.running.rank_monitor import RankStatus
from hvdtrain.launch.running.run_status import RunStatus
from hvdtrain.launch.running.watchdog import Limits, Watchdog, verdict

ELASTIC = replace(LIMITS, elastic=True, apart=LIMITS.hang)


def placed(
    place: int, number: int | None = None, phase: str = "training", **changes: object
) -> RankStatus:
    """A rank of an elastic job, started in this place of its host; `number`: that it has now."""
    started = rank(place, phase, **changes)
    return replace(started, rank=place if number is None else number, slot=f"a:{place}")


def test_ranks_that_are_given_new_numbers() -> None:
    """In an elastic job: rank 0 of three dies, and others take its number; then a new one comes."""
    dog = Watchdog(ELASTIC)
    run = RunStatus("a", "b")

    def shown() -> RunStatus:
        return run.with_ranks(list(dog.statuses.values()))

    dog.hear([placed(n, step=5) for n in range(3)])
    assert shown().ranks == 3
    # The new one has its number before 2 knows that its own has changed.
    dog.hear([placed(0, state="gone"), placed(1, 0, step=6), placed(2, step=6)])
    assert (shown().ranks, shown().step) == (2, 7)
    dog.hear([placed(0, 2, "starting", pid=109)])
    assert shown().ranks == 3
    dog.hear([placed(2, 1, step=6)])
    assert [(one.rank, one.pid) for one in dog.statuses.values()] == [(2, 109), (0, 101), (1, 102)]


@pytest.mark.parametrize(
    ("ranks", "culprits", "says"),
    [
        (
            [placed(0), placed(1, state="stopped", held=20, host="b")],
            [101],
            "rank 1 on host b (process 101) is stopped (SIGSTOP), and the others are waiting for it",
        ),
        (
            [placed(0, phase="init", waiting=True, idle=301), placed(1, idle=301, quiet=301)],
            [101],
            "rank 1 (process 101) is missing: others have waited 300 s for it in hvdtrain.init()",
        ),
        # It makes progress: those that wait have met another failure.
        ([placed(0, phase="init", waiting=True, idle=301), placed(1, quiet=301)], [], ""),
        # The job waits for hosts, of which it has too few.
        ([placed(0, phase="init", waiting=True, idle=301, size=2)], [], ""),
        (
            [placed(n, phase="init", waiting=True, idle=1800) for n in range(2)],
            [],
            "all workers have waited for 1800 s in hvdtrain.init(): can the hosts reach each other?",
        ),
        (
            [placed(n, idle=1800) for n in range(2)],
            [],
            "no worker has made progress for 1800 s (--hang-timeout)",
        ),
        (
            [placed(0, idle=1800), placed(1, phase="callbacks", idle=1800)],
            [101],
            "rank 1 (process 101) is missing: others have waited 1800 s for it in training",
        ),
        (
            [
                placed(0, phase="script", waiting=True, detail="grad", idle=1800),
                placed(1, phase="script", idle=1800, quiet=1800),
            ],
            [101],
            "rank 1 (process 101) is missing: others have waited 1800 s for it in the collective grad",
        ),
        # Computes, in a loop of its own.
        (
            [
                placed(0, phase="script", waiting=True, detail="grad", idle=1800),
                placed(1, phase="script", idle=1800),
            ],
            [],
            "",
        ),
        # Horovod's driver has seen that, and starts another one.
        ([placed(0), placed(1, state="gone", held=900)], [], ""),
    ],
)
def test_whom_an_elastic_job_waits_for(
    ranks: list[RankStatus], culprits: list[int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.time", clock)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.PAUSE_SECONDS", 1e6)
    now = 0.0
    dog = Watchdog(ELASTIC)
    dog.hear(ranks)
    assert not dog.verdict()
    now = 9999.0
    dog.hear(ranks)
    found = dog.verdict()
    assert (found.text.splitlines() or [""])[0].startswith(says)
    assert [one.pid for one in found.culprits] == culprits
    assert bool(found) == bool(says)
    dog.dismiss(found.culprits)
    dog.hear(ranks)
    assert not dog.verdict(), "the others wait for a new one now, for as long"
    now += 200
    dog.hear([replace(ranks[-1], pid=999, state="running", idle=0.0)])
    now += 200
    assert not dog.verdict(), "and for it from when it came"


def test_with_a_short_hang_timeout_the_late_rank_is_replaced_and_the_job_goes_on() -> None:
    """It used the processor a moment ago, for instance to report."""
    limits = Limits(still=6, waiting=6, busy=300, hang=6, apart=6, elastic=True)
    waits = placed(0, phase="init", waiting=True, idle=6, quiet=6)
    found = verdict([waits, placed(1, idle=6, quiet=1)], limits)
    assert [one.pid for one in found.culprits] == [101]
    assert not verdict([waits, placed(1, idle=5, quiet=1)], limits)


def test_a_rank_that_hangs_when_all_others_have_finished_is_not_replaced() -> None:
    """Horovod's driver ends the job then."""
    dog = Watchdog(ELASTIC)
    ranks = [placed(0, phase="ended", state="gone"), placed(1, state="stopped"), placed(2)]
    dog.hear(ranks)
    assert dog.can_replace([ranks[1]]), "rank 2 goes on"
    assert not dog.can_replace(ranks[1:])
    dog.dismiss([ranks[2]])
    assert not dog.can_replace([ranks[1]])
    dog = Watchdog(ELASTIC)
    dog.hear(ranks[1:])
    assert dog.can_replace(ranks[1:]), "there may be a checkpoint"


def test_a_host_that_has_left_tells_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.time", clock)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.PAUSE_SECONDS", 1e6)
    now = 0.0
    dog = Watchdog(ELASTIC)
    for host in "bc":
        dog.hear_host(host)
        dog.hear([placed(0, host=host)])
    dog.verdict()
    dog.forget_host("c")
    now = 301.0
    assert dog.verdict().text.startswith("no report from host b for 300 s")
    dog.forget_host("b")
    assert not dog.verdict()
    assert not dog.statuses
