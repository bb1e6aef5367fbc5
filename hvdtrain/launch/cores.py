"""The processor cores that this process may compute on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Physical cores in this process's mask, and no more than its control group grants the time of."""
    cores = physical_cores(os.sched_getaffinity(0), _CPUS)
    quota = cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, round(quota)))


def physical_cores(cpus: Iterable[int], root: Path) -> int:
    """The number of cores that these logical CPUs are on. What does not tell its core is one of its own.

    Args:
        root: /sys/devices/system/cpu.
    """

    def core_of(cpu: int) -> str:
        try:
            return (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            return str(cpu)

    return len({core_of(cpu) for cpu in cpus})


def cgroup_quota(root: Path, own: Path) -> float | None:
    """Cores' worth of time that the control groups of this process grant: the least on the way to the root.

    Args:
        root: /sys/fs/cgroup.
        own: /proc/self/cgroup.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _read_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _read_v1
        else:
            continue
        # In a container the path may be that of the host, where the file is that of the root.
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and (quota := read(place)) is not None:
                found.append(quota)
    return min(found, default=None)


def _read_v2(folder: Path) -> float | None:
    try:
        granted, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else int(granted) / int(period)


def _read_v1(folder: Path) -> float | None:
    try:
        granted = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if granted < 0 else granted / period
