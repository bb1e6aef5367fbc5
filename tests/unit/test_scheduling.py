"""A shorter time slice for a thread: asked for by the system call, read back by the kernel's own tools."""

from __future__ import annotations

import platform
import threading
from pathlib import Path

import pytest

from hvdtrain.scheduling import SLICE_NANOSECONDS, schedule_promptly, threads_of_this_process

KERNEL = tuple(int(n) for n in platform.release().split(".")[:2])


@pytest.mark.skipif(KERNEL < (6, 12), reason="needs Linux 6.12 or newer: older ones know no slices")
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
