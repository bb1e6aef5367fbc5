"""The driver of an elastic job: a rank that fails is started again where it was, and its host stays."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic import driver as elastic_driver
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.worker import HostUpdateResult

from hvdtrain.errors import EngineError
from hvdtrain.start.parts.elastic_driver import (
    MOST_FAILURES,
    PatientDriver,
    PatientHosts,
    PatientRegistry,
)
from hvdtrain.start.parts.output_tags import CurrentRank
from hvdtrain.worker.elastic_place import IN_MEMORY, ON_DISK

SECONDS = 10


class Rendezvous:
    """Takes what the driver tells it."""

    def init(self, slots: list[SlotInfo]) -> None:
        self.slots = slots

    def stop(self) -> None: ...


class Job:
    """An elastic job whose ranks are threads that end with the code they are given."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self.found = FixedHosts(hosts)
        self.driver = PatientDriver(Rendezvous(), self.found, 1, 8, timeout=SECONDS)
        self.started: list[tuple[str, int]] = []
        self.marks: dict[tuple[str, int], CurrentRank] = {}
        self.ends: dict[tuple[str, int], queue.Queue[int]] = {}
        self.waiting: dict[tuple[str, int], Future[SlotInfo]] = {}

    def run_rank(self, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        place = (slot.hostname, slot.local_rank)
        self.ends[place] = end = queue.Queue()
        assert isinstance(slot.rank, CurrentRank)
        self.marks[place] = slot.rank
        self.started.append(place)
        while not any(event.is_set() for event in events):
            try:
                return end.get(timeout=0.01), time.time()
            except queue.Empty:
                pass
        return 143, time.time()

    def ranks(self) -> dict[int, tuple[str, int]]:
        """Rank -> (host, local rank)."""
        slots = [one for slots in self.driver.host_assignments.values() for one in slots]
        return {one.rank: (one.hostname, one.local_rank) for one in slots}

    def arrive(self, *places: tuple[str, int]) -> None:
        """These ranks are about to start Horovod, and wait for their places."""
        for place in places:
            self.waiting[place] = future = Future()

            def ask(place: tuple[str, int] = place, future: Future[SlotInfo] = future) -> None:
                future.set_result(self.driver.arrive(*place))

            threading.Thread(target=ask, daemon=True).start()

    def told(self) -> dict[tuple[str, int], int]:
        """The ranks of those that waited."""
        found = {place: future.result(SECONDS).rank for place, future in self.waiting.items()}
        self.waiting.clear()
        return found

    def fail(self, *places: tuple[str, int], code: int = 137) -> None:
        """These ranks fail; the others see it and are ready for the next round."""
        round_before = self.driver._worker_registry.last_rendezvous()
        others = set(self.ranks().values()) - {*places}
        for place in places:
            wait_for(lambda place=place: place in self.ends)
            self.ends.pop(place).put(code)
        for place in others - {*self.waiting}:
            threading.Thread(target=self.driver.record_ready, args=place, daemon=True).start()
        wait_for(
            lambda: (
                self.driver.finished()
                or self.driver._worker_registry.last_rendezvous() > round_before
            )
        )

    def change_hosts(self, **hosts: int) -> None:
        """The hosts change; all ranks see it and are ready for the next round."""
        self.found.set(hosts)
        slots = sum(hosts.values())
        wait_for(lambda: self.driver._host_manager.current_hosts.count_available_slots() == slots)
        for place in self.ranks().values():
            threading.Thread(target=self.driver.record_ready, args=place, daemon=True).start()
        wait_for(lambda: self.driver.world_size() == slots)


def wait_for(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setattr(elastic_driver, "HostManager", PatientHosts)
    monkeypatch.setattr(elastic_driver, "WorkerStateRegistry", PatientRegistry)
    jobs = []

    def begin(**hosts: int) -> Job:
        jobs.append(job := Job(hosts))
        job.driver.start(sum(hosts.values()), job.run_rank)
        wait_for(lambda: len(job.started) == sum(hosts.values()))
        return job

    yield begin
    for job in jobs:
        job.driver.stop()


def test_a_job_on_one_host_goes_on(start: Callable[..., Job]) -> None:
    job = start(a=3)
    job.fail(("a", 1))
    wait_for(lambda: len(job.started) == 4)
    assert job.started[-1] == ("a", 1)
    assert not job.driver.finished()
    # The eldest is rank 0, which has the state; each keeps its local rank, and with it its device.
    assert job.ranks() == {0: ("a", 0), 1: ("a", 2), 2: ("a", 1)}
    job.fail(("a", 0))
    assert job.ranks() == {0: ("a", 2), 1: ("a", 1), 2: ("a", 0)}
    # What they write is marked so, too.
    assert {mark.now(): place for place, mark in job.marks.items()} == job.ranks()
    assert job.marks["a", 2] == 2, "as it was started"


def test_a_rank_that_leaves_early_with_0_is_started_again(
    start: Callable[..., Job], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Horovod's driver would end the job, as if it were done."""
    job = start(a=2)
    job.fail(("a", 1), code=0)
    wait_for(lambda: len(job.started) == 3)
    assert not job.driver.finished()
    assert b"local rank 1 of host a ended with exit code 0" in capfdbinary.readouterr().err


def test_all_ranks_that_end_with_0_end_the_job(start: Callable[..., Job]) -> None:
    job = start(a=2)
    job.fail(("a", 0), ("a", 1), code=0)
    wait_for(job.driver.finished)


def test_a_rank_that_left_ends_after_another_began_in_its_place(
    start: Callable[..., Job], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Its end is not that of the new one, which would be started twice; the job would begin again when it is done."""
    job = start(a=2)
    left = job.ends["a", 1]
    job.change_hosts(a=1)
    assert job.ranks() == {0: ("a", 0)}
    job.change_hosts(a=2)
    wait_for(lambda: len(job.started) == 3)
    left.put(0)
    wait_for(left.empty)
    time.sleep(0.2)
    assert not job.driver._worker_registry.has_ended()
    job.fail(("a", 0), ("a", 1), code=0)
    wait_for(job.driver.finished)
    assert len(job.started) == 3
    assert b"while others continue" not in capfdbinary.readouterr().err


class Notifier:
    """Takes what rank 0 is told."""

    def __init__(self, told: list[Any], *unused: Any) -> None:
        self.told = told

    def notify_hosts_updated(self, timestamp: int, update: Any) -> None:
        self.told.append(update)


def test_a_worker_asks_for_changes_that_it_has_discarded(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_driver, "WorkerNotificationClient", Notifier)
    job = start(a=2)
    told: list[Any] = []
    job.driver.register_worker_server("a", 0, told, b"")
    job.fail(("a", 1))
    job.driver.tell_changes()
    assert told == [], "nothing has changed since this round began"
    job.found.set({"a": 3})
    wait_for(lambda: told == [HostUpdateResult.added])
    job.driver.tell_changes()
    assert told[1:] == [HostUpdateResult.mixed]


def test_the_only_one_with_the_state_is_on_a_slot_that_is_withdrawn(
    start: Callable[..., Job],
) -> None:
    """It stays until the new one has the state, which would begin from scratch."""
    job = start(a=2)
    job.arrive(("a", 0), ("a", 1))
    job.told()
    job.found.set({"a": 1})
    wait_for(lambda: job.driver._host_manager.current_hosts.count_available_slots() == 1)
    job.fail(("a", 0))
    job.arrive(("a", 0), ("a", 1))
    assert job.told() == {("a", 1): 0, ("a", 0): 1}
    told: list[Any] = []
    job.driver._worker_clients["a", 1] = Notifier(told)
    job.driver.tell_changes()
    assert told == [HostUpdateResult.mixed]
    job.arrive(("a", 0), ("a", 1))
    assert job.told() == {("a", 0): 0, ("a", 1): -1}


def test_the_reason_for_an_end_is_said(
    start: Callable[..., Job], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = start(a=1)
    job.driver.stop(RESET_LIMIT_EXCEEDED_MESSAGE.format(3))
    job.driver.stop("no hosts are left")
    said = capfdbinary.readouterr().err.decode()
    assert "the job ends: the number of restarts has reached --reset-limit (3)" in said
    assert "the job ends: no hosts are left" in said


def test_too_few_slots(
    start: Callable[..., Job], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = start(a=1)
    job.driver._timeout = 0.1
    too_few = "the job needs 2 slots, but had only 1 in the last 0.1 seconds (--elastic-timeout)"
    with pytest.raises(EngineError, match=re.escape(too_few)):
        job.driver.wait_for_available_slots(2)
    job.driver._min_num_proc = 2
    job.driver.resume()
    assert job.driver.finished()
    assert f"the job ends: {too_few}" in capfdbinary.readouterr().err.decode()


def test_a_host_whose_ranks_all_failed_comes_last(start: Callable[..., Job]) -> None:
    job = start(a=2, b=2)
    job.fail(("a", 0), ("a", 1))
    wait_for(lambda: len(job.started) == 6)
    assert sorted(job.started[-2:]) == [("a", 0), ("a", 1)]
    assert job.ranks() == {0: ("b", 0), 1: ("b", 1), 2: ("a", 0), 3: ("a", 1)}


def test_a_host_whose_ranks_keep_failing(
    start: Callable[..., Job], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = start(a=1, b=2)
    for _ in range(MOST_FAILURES):
        job.fail(("b", 1))
    wait_for(lambda: job.ranks() == {0: ("a", 0)})
    assert not job.driver.finished()
    said = capfdbinary.readouterr().err.decode()
    assert said.count("local rank 1 of host b failed and is being restarted") == MOST_FAILURES - 1
    assert "host b is skipped: workers failed there 3 times in a row" in said


def test_failures_with_progress_between_them_are_not_in_a_row(start: Callable[..., Job]) -> None:
    job = start(a=1, b=2)
    for _ in range(MOST_FAILURES + 1):
        job.driver.note_saved(IN_MEMORY)
        job.fail(("b", 1))
        assert set(job.ranks().values()) == {("a", 0), ("b", 0), ("b", 1)}
    for _ in range(MOST_FAILURES - 1):
        job.fail(("b", 1))
    wait_for(lambda: job.ranks() == {0: ("a", 0)})


def test_a_failure_before_all_are_there_is_like_any_other(start: Callable[..., Job]) -> None:
    """Horovod would be told of the ranks that there are, wait for the others, and abort the process."""
    job = start(a=3)
    job.arrive(("a", 0), ("a", 1))
    time.sleep(0.2)
    assert not any(future.done() for future in job.waiting.values())
    job.fail(("a", 2))
    wait_for(lambda: len(job.started) == 4)
    assert not any(future.done() for future in job.waiting.values())
    # One that has died while it waited is not taken for the one in its place.
    job.fail(("a", 1))
    wait_for(lambda: len(job.started) == 5)
    assert job.waiting.pop(("a", 1)).result(SECONDS).rank == -1
    job.arrive(("a", 2))
    time.sleep(0.2)
    assert not any(future.done() for future in job.waiting.values())
    job.arrive(("a", 1))
    assert job.told() == {("a", 0): 0, ("a", 2): 1, ("a", 1): 2}
    assert job.driver.has_arrived("a", 0)
    job.driver.note_saved(IN_MEMORY)
    # Who comes back has met a failure of Horovod's.
    job.arrive(("a", 0), ("a", 1))
    job.fail(("a", 2))
    wait_for(lambda: len(job.started) == 6)
    job.arrive(("a", 2))
    assert job.told() == {("a", 0): 0, ("a", 1): 1, ("a", 2): 2}


def test_a_rank_that_leaves_with_0_while_others_wait_to_start(start: Callable[..., Job]) -> None:
    job = start(a=2)
    job.arrive(("a", 0))
    job.fail(("a", 1), code=0)
    wait_for(lambda: len(job.started) == 3)
    job.arrive(("a", 1))
    assert job.told() == {("a", 0): 0, ("a", 1): 1}


def test_a_rank_that_ends_with_0_before_the_others_look_again(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have arrived: one that had nothing more to do is not started again, and the others get their places."""
    monkeypatch.setattr("hvdtrain.start.parts.elastic_driver.POLL_SECONDS", 1.0)
    job = start(a=2)
    job.arrive(("a", 0))
    wait_for(lambda: job.driver.has_arrived("a", 0))
    job.arrive(("a", 1))
    assert job.waiting["a", 1].result(0.5).rank == 1
    job.ends["a", 1].put(0)
    wait_for(job.driver._worker_registry.has_ended)
    assert job.told() == {("a", 0): 0, ("a", 1): 1}
    job.ends["a", 0].put(0)
    wait_for(job.driver.finished)
    assert len(job.started) == 2


@pytest.mark.parametrize("saved", [True, False])
def test_no_rank_is_left_that_was_training(
    start: Callable[..., Job], saved: bool, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A new one alone would begin from scratch, unless there is a checkpoint."""
    job = start(a=2)
    job.arrive(("a", 0), ("a", 1))
    job.told()
    job.driver.note_saved(ON_DISK if saved else IN_MEMORY)
    job.fail(("a", 0))
    wait_for(lambda: len(job.started) == 3)
    job.arrive(("a", 0))
    job.fail(("a", 1))
    assert job.driver.finished() != saved
    said = capfdbinary.readouterr().err.decode()
    if saved:
        job.arrive(("a", 1))
        assert job.told() == {("a", 0): 0, ("a", 1): 1}
        assert (
            "none of the workers that were training is left: the job continues from the newest check"
            in said
        )
    else:
        assert "the job ends: no worker with the state of the training is left" in said


@pytest.mark.parametrize("saved", [True, False])
def test_all_ranks_fail(start: Callable[..., Job], saved: bool) -> None:
    job = start(a=2)
    if saved:
        job.driver.note_saved(ON_DISK)
    for _ in range(MOST_FAILURES - 1 if saved else 0):
        job.fail(("a", 0), ("a", 1))
        assert not job.driver.finished()
    job.fail(("a", 0), ("a", 1))
    wait_for(job.driver.finished)
    assert len(job.started) == (2 * MOST_FAILURES if saved else 2)


def test_the_only_host_keeps_failing(start: Callable[..., Job]) -> None:
    job = start(a=2)
    for _ in range(MOST_FAILURES):
        assert not job.driver.finished()
        job.fail(("a", 1))
    wait_for(job.driver.finished)
    assert job.driver.get_results().error_message == "no hosts are left for the workers"
