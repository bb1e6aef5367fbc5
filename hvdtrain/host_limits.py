"""What this process may use of its host: limits of its cgroup, as in a container or a Slurm job, and of the machine.

The lowest limit of the cgroup and its ancestors counts, of version 1 or 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

TOO_LOW = 1.1
"""Upper bound of the ratio of a step's measured peak of memory to its estimate; see docs/estimate.md."""
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_Read = Callable[[Path], float | None]


def available_cores() -> int:
    """Return the number of cores that this process may run on (its affinity mask, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """Return the CPU quota of this process in cores, or None."""
    return _lowest("cpu", _quota_v2, _quota_v1, root, own)


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Return the main memory in bytes that this process may use with the others of its cgroup."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    v2, v1 = _number_in("memory.max"), _number_in("memory.limit_in_bytes")
    limit = _lowest("memory", v2, v1, root, own)
    return machine if limit is None else min(machine, int(limit))


def _lowest(controller: str, read_v2: _Read, read_v1: _Read, root: Path, own: Path) -> float | None:
    """Return the lowest of what `read_v2` or `read_v1` finds in the folders of this process's cgroup."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, read_v2
        elif controller in controllers.split(","):
            base, read = root / controller, read_v1
        else:
            continue
        # In a container, the path may be the host's while the mounted files are those of the container's root.
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and (limit := read(place)) is not None:
                found.append(limit)
    return min(found, default=None)


def _number_in(name: str) -> _Read:
    def read(folder: Path) -> float | None:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # "max": no limit.
            return None

    return read


def _quota_v2(folder: Path) -> float | None:
    try:
        granted, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else int(granted) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        granted = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if granted < 0 else granted / period
