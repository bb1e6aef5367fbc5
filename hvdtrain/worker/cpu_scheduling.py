"""Schedule the threads that Horovod starts so that they do not wait for the computation, nor interrupt it for nothing.

Every millisecond Horovod's background thread asks the other ranks which tensors are ready, and waits for their answer.
If a rank computes on all of its cores, the kernel runs the thread only when a time slice ends, some milliseconds
later, while the other ranks' threads poll for it on cores that compute. Since Linux 6.12 a thread may request a shorter
slice; then it runs earlier, for as much time in total as before. That needs no privilege, and older kernels ignore it.
Measured in turns within one job, two ranks on two cores, MNIST network, batch 64 per rank, over MPI: 1.17 to 1.8 times
as many examples per second. A shorter cycle time also pays off then.

Over Gloo, what another rank has sent wakes a thread of Gloo's, which polls until the background thread has asked for
it. Under SCHED_BATCH a thread that wakes up does not interrupt others, so it no longer keeps the background thread, for
which it polls, from the core. Measured as above: 8.0 ms a step in place of 11, and 6.8 over MPI; for ResNet-20 102 ms
in place of 122, and 106 over MPI.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from collections.abc import Iterable
from pathlib import Path

SLICE_NANOSECONDS = 100_000
"""Shortest slice that Linux grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, for which Python has no function."""

_ATTRIBUTES = "IIQiIQQQ"
"""Format of struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""


def kernel_knows_slices(release: str) -> bool:
    """Return whether Linux `release` (such as 6.12.3-generic) lets a thread choose its slice."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and tuple(map(int, numbers.groups())) >= (6, 12)


def threads_of_this_process() -> set[int]:
    """Return the ids of this process's threads; empty on systems without /proc."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.is_dir() else set()


def schedule_horovod(threads: Iterable[int], over_gloo: bool) -> None:
    """Schedule the threads of a Horovod that has just started.

    Args:
        threads: Their ids; its background thread started first, and started the others.
        over_gloo: Whether the others are Gloo's.
    """
    in_order = sorted(threads)
    schedule_promptly(in_order[:1])
    schedule_promptly(in_order[1:], interrupts=not over_gloo)


def schedule_promptly(threads: Iterable[int], interrupts: bool = True) -> list[int]:
    """Request the shortest time slice for `threads`; return those for which the kernel granted it.

    With `interrupts`, they may interrupt others when they wake up.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return []
    policy = os.SCHED_OTHER if interrupts else os.SCHED_BATCH
    call = ctypes.CDLL(None).syscall
    agreed = []
    for thread in threads:
        try:
            nice = os.getpriority(os.PRIO_PROCESS, thread)
        except ProcessLookupError:
            continue  # The thread has ended.
        size = struct.calcsize(_ATTRIBUTES)
        attributes = struct.pack(_ATTRIBUTES, size, policy, 0, nice, 0, SLICE_NANOSECONDS, 0, 0)
        if call(number, thread, ctypes.create_string_buffer(attributes, size), 0) == 0:
            agreed.append(thread)
    return agreed
