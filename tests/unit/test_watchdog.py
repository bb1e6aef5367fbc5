"""When a run cannot go on, and which rank is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from seen_ranks import LIMITS, rank

from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program
from hvdtrain.launch.running.rank_monitor import RankStatus
from hvdtrain.launch.running.srun_tasks import BEGIN_SECONDS, SILENT_SECONDS
from hvdtrain.launch.running.stopped_programs import StoppedProgram
from hvdtrain.launch.running.watchdog import Limits, Watchdog, limits_of, verdict

WELL = [rank(0), rank(1)]


@pytest.mark.parametrize(
    "ranks",
    [
        WELL,
        [rank(0), rank(1, state="stopped", held=19)],
        [rank(0), rank(1, state="traced", held=1000)],
        [rank(0, "script", idle=9999), rank(1, "script", idle=9999)],
        [rank(0, "ended"), rank(1, "ended", state="gone", held=1000)],
        [rank(0), rank(1, "ended", state="gone", held=1000)],
        [rank(0, "ended", quiet=899), rank(1, "ended", state="gone", held=1000)],
        # Programs that are no Python scripts; one has ended.
        [replace(rank(0), heartbeat=None), replace(rank(1), heartbeat=None, state="gone", held=99)],
        [rank(0, "init", waiting=True, idle=299), rank(1, "starting", idle=299)],
        [rank(0, "init", waiting=True, idle=301), rank(1, "starting", allowed=600.0, idle=301)],
        [rank(0, "init", waiting=True, idle=301), rank(1, "starting", quiet=299)],
        [rank(0, "init", waiting=True, idle=899), rank(1, "starting", quiet=1)],
        [rank(0, "script", waiting=True, detail="join", idle=9999), rank(1, "script", quiet=9999)],
        [rank(0, "starting", quiet=899), rank(1, "starting", quiet=9999)],
        [rank(0, "starting", quiet=9999, allowed=9999), rank(1, "starting", quiet=9999)],
        [rank(0, "ended", quiet=9999), rank(1, "starting", quiet=9999)],
        [rank(0, idle=1799), rank(1, idle=5000)],
        [rank(0, idle=1900, allowed=200.0), rank(1, idle=5000)],
    ],
)
def test_a_run_that_can_go_on(ranks: list[RankStatus]) -> None:
    assert verdict(ranks, LIMITS).text == ""


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (
            [rank(0), rank(1, state="stopped", held=20, host="b")],
            "rank 1 on host b (process 101) is stopped (SIGSTOP), and the others are waiting for it: by a debugger, "
            "Ctrl-Z or `kill -STOP`?\n  rank 0: in training, step 8\n  rank 1: in training, step 8, stopped",
        ),
        (
            [rank(0), rank(1), rank(2, state="gone", held=21)],
            "rank 2 (process 102) is gone before the end of the script (os._exit? out of memory?) "
            "while others are still running\n"
            "  ranks 0, 1: in training, step 8\n"
            "  rank 2: in training, step 8, gone",
        ),
        (
            [
                rank(0, "init", waiting=True, idle=301),
                rank(1, "starting", quiet=300),
                rank(2, "starting", quiet=301, state="uninterruptible"),
            ],
            "rank 1 (process 101), rank 2 (process 102) are missing: others have waited 300 s for "
            "them in hvdtrain.init()\n"
            "  rank 0: in hvdtrain.init()\n"
            "  rank 1: in start-up\n"
            "  rank 2: in start-up, uninterruptible",
        ),
        (
            [rank(0, "init", waiting=True, idle=900), rank(1, "starting", quiet=0)],
            "rank 1 (process 101) is missing: others have waited 900 s for it in hvdtrain.init()\n"
            "  rank 0: in hvdtrain.init()\n"
            "  rank 1: in start-up",
        ),
        (
            [
                rank(0, "init", waiting=True, idle=20),
                rank(1, "ended", state="gone", held=1),
                rank(2, "init", waiting=True, idle=3),
            ],
            "rank 1 (process 101) is missing: the script has ended there, but others are waiting for it in "
            "hvdtrain.init()\n"
            "  ranks 0, 2: in hvdtrain.init()\n"
            "  rank 1: in shutdown, gone",
        ),
        (
            [rank(n, "init", waiting=True, idle=301) for n in range(2)],
            "all workers have waited for 300 s in hvdtrain.init(): can the hosts reach each other?\n"
            "  ranks 0, 1: in hvdtrain.init()",
        ),
        (
            [rank(n, "init", waiting=True, idle=301, size=4) for n in (0, 2)],
            "ranks 1, 3 have not started (or ended at once), and the others have waited 300 s in "
            "hvdtrain.init(): check the hosts where no worker has started\n  ranks 0, 2: in hvdtrain.init()",
        ),
        (
            [rank(n, "script", waiting=True, detail="grad", idle=301) for n in range(2)],
            "all workers have waited for 300 s in the collective grad: can the hosts reach each other?\n"
            "  ranks 0, 1: in the script, collective grad",
        ),
        (
            [rank(0, "ended", quiet=901), rank(1, "ended", state="gone", held=1000)],
            "all workers finished, but the run did not end within 900 s\n  rank 0: in shutdown\n  rank 1: in "
            "shutdown, gone",
        ),
        (
            [rank(0, "starting", quiet=900), rank(1, "starting", quiet=901)],
            "no worker has called hvdtrain.init() or computed for 900 s (--hang-timeout)\n"
            "  ranks 0, 1: in start-up",
        ),
        (
            [rank(0, idle=1800), rank(1, "input", idle=1801, step=6)],
            "no worker has made progress for 1800 s (--hang-timeout)\n"
            "  rank 0: in training, step 8\n"
            "  rank 1: in data input, step 7",
        ),
    ],
)
def test_a_run_that_cannot(ranks: list[RankStatus], says: str) -> None:
    assert verdict(ranks, LIMITS).text == says


STOPPED = {"state": "stopped", "held": 2}


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, idle=1800), rank(1, idle=1801, **STOPPED)],
        [rank(0, "init", waiting=True, idle=301), rank(1, "starting", quiet=300, **STOPPED)],
        [rank(n, "init", waiting=True, idle=301, **STOPPED if n else {}) for n in range(2)],
        [rank(n, waiting=True, detail="grad", idle=301, **STOPPED if n else {}) for n in range(2)],
    ],
)
def test_a_stopped_rank_is_named_whichever_limit_comes_first(ranks: list[RankStatus]) -> None:
    assert verdict(ranks, LIMITS).text.startswith("rank 1 (process 101) is stopped (SIGSTOP)")


def test_limits_are_never_longer_than_the_users() -> None:
    assert limits_of(5) == Limits(5, 5, 300, 5)
    assert limits_of(7200) == Limits(20, 300, 7200, 7200)


def test_the_watchdog_remembers_every_rank() -> None:
    dog = Watchdog(LIMITS)
    dog.hear(WELL)
    dog.hear([rank(1, state="stopped", held=30)])
    assert dog.verdict().text.startswith("rank 1 ")
    dog.limits = None
    assert dog.verdict().text == ""


def test_a_terminal_that_was_halted_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for a reader of their output as well. Over lunch that is longer than any limit."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.time", clock)
    now = 1000.0
    dog = Watchdog(LIMITS)
    dog.hear(WELL)
    assert dog.verdict().text == ""
    now += 7200
    dog.hear([rank(0, idle=7200), rank(1, idle=7200)])
    assert dog.verdict().text == ""
    for _ in range(1799):
        now += 1
        dog.hear([rank(0, idle=7200), rank(1, idle=7200)])
        assert dog.verdict().text == ""
    now += 1
    assert "no worker has made progress" in dog.verdict().text


def test_ranks_of_which_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is stopped tells nothing, and its ranks would look well for ever."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.time", clock)
    now = 1000.0
    dog = Watchdog(LIMITS)
    dog.hear([rank(0), rank(1, host="b"), rank(2, "ended", state="gone", host="b")])
    for _ in range(299):
        now += 1
        dog.hear([rank(0)])
        assert dog.verdict().text == ""
    dog.hear([rank(0)])
    now += 1
    assert dog.verdict().text.startswith(
        "no report from rank 1 on host b (process 101) for 300 s: have hvdtrain"
    )


def test_a_host_of_which_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent may be stopped before it has found a rank."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("hvdtrain.launch.running.watchdog.time", clock)
    now = 1000.0
    dog = Watchdog(LIMITS)
    for host in "bc":
        dog.hear_host(host)
    for _ in range(299):
        now += 1
        dog.hear([rank(0)])
        dog.hear_host("b")
        assert dog.verdict().text == ""
    now += 1
    dog.hear([rank(0), rank(1, host="b")])
    dog.hear_host("b")
    assert dog.verdict().text.startswith("no report from host c for 300 s: have hvdtrain")


@pytest.mark.parametrize(
    ("tells", "silent", "goes_on", "after"),
    [
        ([0, 1], 1, [0], SILENT_SECONDS),  # Stopped: it has told, and another goes on telling.
        ([0], 1, [0], BEGIN_SECONDS),  # Stopped before it told anything.
        ([0, 1], 0, [], LIMITS.waiting),  # No one tells: the network may be slow.
        ([1], 0, [], LIMITS.waiting),
        ([], None, [], LIMITS.waiting),  # srun still waits for its nodes.
    ],
)
def test_a_task_of_srun_of_which_nothing_is_heard(
    monkeypatch: pytest.MonkeyPatch,
    tells: list[int],
    silent: int | None,
    goes_on: list[int],
    after: float,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    for module in ("watchdog", "srun_tasks"):
        monkeypatch.setattr(f"hvdtrain.launch.running.{module}.time", clock)
    now = 1000.0
    dog = Watchdog(LIMITS)
    dog.tasks.expect(["a", "b", "c"], BEGIN_SECONDS)
    for one in tells:
        dog.tasks.hear(one, ended=False)
    if tells:
        dog.tasks.hear(2, ended=True)
    for _ in range(int(after)):
        assert dog.verdict().text == ""
        now += 1
        for one in goes_on:
            dog.tasks.hear(one, ended=False)
    said = dog.verdict().text
    if silent is None:
        assert said == ""
    else:
        assert f"rank {silent} on host {'abc'[silent]}" in said
        assert f" for {after:g} s: have hvdtrain" in said
        assert "rank 2" not in said and not any(f"rank {one} " in said for one in goes_on)


@pytest.mark.parametrize(
    "limits", [LIMITS, None], ids=["watched ranks", "ranks that others look after"]
)
def test_a_stopped_program_ends_a_run_after_the_limit(limits: Limits | None) -> None:
    dog = Watchdog(limits, still=20.0)
    orted = StoppedProgram("orted", 9, 19.9, "b")
    assert dog.verdict([orted]).text == ""
    assert dog.verdict([replace(orted, held=20.0)]).text.startswith(
        "orted on host b (process 9), which the run waits for, is stopped (SIGSTOP)"
    )
    assert Watchdog(limits).verdict([replace(orted, held=9e9)]).text == "", "--hang-timeout 0"


def test_whom_a_failed_rank_may_have_missed() -> None:
    dog = Watchdog(LIMITS)
    dog.hear([rank(0), rank(1, "starting"), rank(2, state="stopped", held=1), rank(3)])
    assert dog.absent({0}) == (
        "rank 2 (process 102) is stopped (SIGSTOP) while others waited for it"
    )
    dog.hear([rank(2, state="gone")])
    assert "rank 2 (process 102) is stopped" in dog.absent({0}), "and was killed so"
    assert dog.absent({0, 2}) == (
        "rank 1 (process 101) is missing: hvdtrain.init() was not called while others waited for it"
    )
    dog.hear([rank(1, "ended", state="gone"), rank(3, state="gone")])
    assert "rank 1 (process 101) is missing: the script has ended" in dog.absent({0, 2})
    assert "rank 3 (process 103) is gone before the end" in dog.absent({0, 1, 2})
    assert dog.absent({0, 1, 2, 3}) == ""


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([rank(0), rank(1, state="gone")], ""),
        ([rank(0, "init", waiting=True), rank(1, "init", waiting=True)], ""),
        ([rank(0, "init", waiting=True), rank(1, state="gone")], ""),  # Perhaps ended with the run.
        (
            [rank(0, "init", waiting=True, state="gone"), rank(1, "ended", state="gone")],
            "rank 1 (process 101) is missing: the script has ended there, but others still need it",
        ),
        (
            [rank(0, "init", waiting=True, size=3)],
            "ranks 1, 2 ended or did not start, while others waited in hvdtrain.init()",
        ),
    ],
)
def test_who_has_not_come_to_init(ranks: list[RankStatus], says: str) -> None:
    dog = Watchdog(LIMITS)
    dog.hear(ranks)
    assert dog.missed_init() == says


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([rank(0, idle=80), rank(1, "callbacks", idle=80)], "in training"),
        (
            [rank(0, "callbacks", waiting=True, detail="stop", idle=80), rank(1, "input", idle=80)],
            "in the collective stop",
        ),
        ([rank(0, idle=79), rank(1, "callbacks", idle=80)], ""),
        ([rank(0, idle=80), rank(1, "callbacks", idle=79)], ""),
        ([rank(0, idle=80), rank(1, "callbacks", idle=80, allowed=1.0)], ""),
        ([rank(0, idle=80), rank(1, idle=80)], ""),  # Nobody knows which of them.
        ([rank(0, "callbacks", idle=80), rank(1, "callbacks", idle=80)], ""),
        ([rank(n, waiting=True, detail="allreduce b", idle=80) for n in range(2)], ""),
        # Computes, in a loop of its own.
        ([rank(0, idle=80), rank(1, "script", idle=80)], ""),
    ],
)
def test_who_stays_outside_a_step(ranks: list[RankStatus], says: str) -> None:
    """Over Gloo Horovod's stall check does not see it."""
    found = verdict(ranks, replace(LIMITS, apart=80.0)).text
    said = f"rank 1 (process 101) is missing: others have waited 80 s for it {says}"
    assert found.startswith(said) if says else not found
    assert not verdict(ranks, LIMITS).text


def test_who_waits_in_different_collectives() -> None:
    ranks = [rank(n, waiting=True, detail=name, idle=80) for n, name in enumerate("aba")]
    limits = replace(LIMITS, apart=80.0)
    assert verdict(ranks, limits).text.startswith(
        "the ranks have waited 80 s for each other in different collectives: all ranks must call the same "
        "collectives with the same names\n"
        "  ranks 0, 2: in training, step 8, collective a\n"
    )
    assert not verdict(ranks, LIMITS)
    assert not verdict([*ranks, rank(3)], limits)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({"stall_warning_seconds": 5, "stall_shutdown_seconds": 8}, 23.0),
        ({"stall_shutdown_seconds": 0}, math.inf),
        ({"stall_check": False}, math.inf),
    ],
)
def test_the_users_limits_of_a_stall_count(options: dict[str, Any], apart: float) -> None:
    plan = LaunchPlan(program=Program(Path(__file__)), np=2, controller="gloo", **options)
    assert limits_of(1800, plan).apart == apart
    assert limits_of(1800).apart == math.inf
