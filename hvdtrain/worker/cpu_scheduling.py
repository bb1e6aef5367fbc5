"""Schedule Horovod's background thread promptly when ranks occupy all cores.

Every millisecond that thread asks the other ranks what is ready, and waits for their answer. Where a rank
computes on all of its cores, the kernel gives the thread its turn only when a time slice ends, some
milliseconds later, and meanwhile the other ranks' threads poll for it on cores that compute. Since Linux 6.12 a
thread may ask for a shorter slice, and then has its turn earlier, for as much time as before. That needs no
privilege. Older kernels ignore it. Measured in turns within one job, two ranks on two cores, MNIST network,
batch 64 per rank, over MPI: 1.17 to 1.8 times the examples per second. With it a shorter cycle pays off as well.
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
"""The shortest slice that Linux grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call; Python has no function for it."""

_ATTRIBUTES = "IIQiIQQQ"
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""


def kernel_knows_slices(release: str) -> bool:
    """Whether the Linux of version `release` (6.12.3-generic) lets a thread choose its slice."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and tuple(map(int, numbers.groups())) >= (6, 12)


def threads_of_this_process() -> set[int]:
    """Return the ids of this process's threads; empty where there is no /proc."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.is_dir() else set()


def schedule_promptly(threads: Iterable[int]) -> list[int]:
    """Ask the kernel for the shortest time slice for `threads`; return those for which it agreed."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return []
    call = ctypes.CDLL(None).syscall
    agreed = []
    for thread in threads:
        try:
            nice = os.getpriority(os.PRIO_PROCESS, thread)
        except ProcessLookupError:
            continue  # It has ended meanwhile.
        size = struct.calcsize(_ATTRIBUTES)
        attributes = struct.pack(
            _ATTRIBUTES, size, os.SCHED_OTHER, 0, nice, 0, SLICE_NANOSECONDS, 0, 0
        )
        if call(number, thread, ctypes.create_string_buffer(attributes, size), 0) == 0:
            agreed.append(thread)
    return agreed
