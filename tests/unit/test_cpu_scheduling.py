"""A shorter time slice for a thread: asked for by the system call, read back by the kernel's own tools."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest

from hvdtrain.runtime import engine_environment
from hvdtrain.worker.cpu_scheduling import (
    SLICE_NANOSECONDS,
    kernel_knows_slices,
    schedule_horovod,
    schedule_promptly,
    threads_of_this_process,
)


@pytest.mark.skipif(
    not kernel_knows_slices(platform.release()),
    reason="needs Linux 6.12 or newer: older ones know no slices",
)
def test_a_new_thread_gets_the_short_slice_and_the_others_do_not() -> None:
    before = threads_of_this_process()
    done = threading.Event()
    worker = threading.Thread(target=done.wait)
    worker.start()
    try:
        new = threads_of_this_process() - before
        assert new == {worker.native_id}
        assert schedule_promptly(new) == [worker.native_id]
        assert _slice(worker.native_id or 0) == SLICE_NANOSECONDS
        assert _slice(threading.main_thread().native_id or 0) != SLICE_NANOSECONDS
    finally:
        done.set()
        worker.join()


@pytest.mark.skipif(platform.system() != "Linux", reason="needs Linux's policies")
@pytest.mark.parametrize("over_gloo", [True, False])
def test_threads_of_gloo_do_not_interrupt_others_when_they_wake_up(over_gloo: bool) -> None:
    done = threading.Event()
    workers = [threading.Thread(target=done.wait) for _ in range(3)]
    for worker in workers:
        worker.start()
    threads = sorted(worker.native_id or 0 for worker in workers)
    try:
        schedule_horovod(threads, over_gloo)
        others = os.SCHED_BATCH if over_gloo else os.SCHED_OTHER
        assert [os.sched_getscheduler(thread) for thread in threads] == [
            os.SCHED_OTHER,
            others,
            others,
        ]
    finally:
        done.set()
        for worker in workers:
            worker.join()


def test_without_threads_nothing_is_scheduled() -> None:
    before = {thread: os.sched_getscheduler(thread) for thread in threads_of_this_process()}
    schedule_horovod([], over_gloo=True)
    assert {thread: os.sched_getscheduler(thread) for thread in before} == before


def test_kernels() -> None:
    assert kernel_knows_slices("6.12.0-generic")
    assert kernel_knows_slices("7.0")
    assert not kernel_knows_slices("6.11.9")
    assert not kernel_knows_slices("5.15.0-1051-aws")
    assert not kernel_knows_slices("unknown")


ONE_HOST = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_SIZE": "2",
}


def test_short_cycles_only_where_they_pay() -> None:
    assert engine_environment(ONE_HOST, "6.12.0")["HOROVOD_CYCLE_TIME"] == "0.3"
    assert "HOROVOD_CYCLE_TIME" not in engine_environment(ONE_HOST, "6.8.0")
    two_hosts = {"HOROVOD_LOCAL_SIZE": "2", "HOROVOD_SIZE": "4"}
    assert "HOROVOD_CYCLE_TIME" not in engine_environment(two_hosts, "6.12.0")
    over_gloo = ONE_HOST | {"HOROVOD_CONTROLLER": "gloo"}
    assert "HOROVOD_CYCLE_TIME" not in engine_environment(over_gloo, "6.12.0")
    chosen = ONE_HOST | {"HOROVOD_CYCLE_TIME": "5"}
    tuned = {**ONE_HOST, "HOROVOD_AUTOTUNE": "1"}
    assert "HOROVOD_CYCLE_TIME" not in engine_environment(tuned, "6.12.0")
    assert "HOROVOD_CYCLE_TIME" not in engine_environment(chosen, "6.12.0")


def test_a_thread_that_has_ended_is_left_out() -> None:
    beyond_every_pid = 2**30
    assert schedule_promptly([beyond_every_pid]) == []


def _slice(thread: int) -> int:
    """The slice in nanoseconds, from the kernel's account of the thread's schedule."""
    for line in Path(f"/proc/self/task/{thread}/sched").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "se.slice":
            return int(value)
    pytest.skip("this kernel does not tell a thread's slice in /proc")
