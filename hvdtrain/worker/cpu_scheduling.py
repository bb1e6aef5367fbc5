"""Schedule Horovod's background thread promptly when ranks occupy all cores.

Every millisecond that thread asks the other ranks which tensors are ready, and waits for their answer. If a rank
computes on all of its cores, the kernel runs the thread only when a time slice ends, some milliseconds later, while
the other ranks' threads poll for it on cores that compute. Since Linux 6.12 a thread may request a shorter slice; then
it runs earlier, for as much time in total as before. That needs no privilege, and older kernels ignore it. Measured in
turns within one job, two ranks on two cores, MNIST network, batch 64 per rank, over MPI: 1.17 to 1.8 times as many
examples per second. A shorter cycle time also pays off then.
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


def schedule_promptly(threads: Iterable[int]) -> list[int]:
    """Request the shortest time slice for `threads`; return those for which the kernel granted it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return []
    call = ctypes.CDLL(None).syscall
    agreed = []
    for thread in threads:
        try:
            nice = os.getpriority(os.PRIO_PROCESS, thread)
        except ProcessLookupError:
            continue  # The thread has ended.
        size = struct.calcsize(_ATTRIBUTES)
        attributes = struct.pack(
            _ATTRIBUTES, size, os.SCHED_OTHER, 0, nice, 0, SLICE_NANOSECONDS, 0, 0
        )
        if call(number, thread, ctypes.create_string_buffer(attributes, size), 0) == 0:
            agreed.append(thread)
    return agreed
