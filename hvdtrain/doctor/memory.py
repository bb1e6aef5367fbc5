"""Shared memory and the limits of processes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import statvfs_result
from pathlib import Path

from hvdtrain.doctor.finding import Finding, fail, ok, warn

MEGABYTE = 2**20
LEAST_FREE = 32 * MEGABYTE
"""Open MPI keeps a few MB for each rank in shared memory, NCCL some 10 MB for each pair of GPUs."""
SMALL = 512 * MEGABYTE
"""Docker gives 64 MB, which does for two ranks on CPUs, not for NCCL on many GPUs."""

_SHM_FIX = (
    "in a container: --ipc=host or --shm-size=1g; else: mount -o remount,size=2g /dev/shm (as root)"
)
_FULL_FIX = "delete what is left there (ls -l /dev/shm), or enlarge it; " + _SHM_FIX


def look_at_shared_memory(
    folder: Path, statvfs: Callable[[Path], statvfs_result]
) -> Sequence[Finding]:
    """Size of, and room in, the folder through which the ranks of a host exchange data."""
    name = "shared memory"
    try:
        found = statvfs(folder)
    except OSError as error:
        fix = f"mount -t tmpfs -o size=2g,mode=1777 tmpfs {folder} (as root)"
        return [fail(name, f"{folder}: {error.strerror}", fix)]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    seen = f"{folder}: {_amount(free)} free of {_amount(size)}"
    if free < LEAST_FREE:
        return [fail(name, seen, _FULL_FIX if size >= SMALL else _SHM_FIX)]
    if size < SMALL:
        return [warn(name, f"{seen}: little for many ranks or GPUs", _SHM_FIX)]
    return [ok(name, seen)]


@dataclass(frozen=True)
class Limit:
    """A limit of `ulimit`: below `least` it does not work, below `good` not for large jobs."""

    name: str
    kind: int
    option: str
    least: int
    good: int
    unit: int
    suffix: str


LIMITS = (
    # Each rank holds a socket or two for each other one, and TensorFlow a file for each reader.
    Limit("open files", resource.RLIMIT_NOFILE, "-n", 256, 1024, 1, ""),
    # A rank has some 20 threads, and as many as it has cores for each of three pools.
    Limit("processes", resource.RLIMIT_NPROC, "-u", 256, 2048, 1, ""),
    Limit("stack", resource.RLIMIT_STACK, "-s", MEGABYTE, 4 * MEGABYTE, 1024, " kB"),
)


def look_at_limits(
    getrlimit: Callable[[int], tuple[int, int]], infiniband: Path
) -> Sequence[Finding]:
    """ulimit of files, processes, stack, and of locked memory where there is InfiniBand (a folder of /sys)."""
    findings = [_limit_finding(limit, *getrlimit(limit.kind)) for limit in LIMITS]
    return [*findings, _locked_memory(*getrlimit(resource.RLIMIT_MEMLOCK), infiniband)]


def _limit_finding(limit: Limit, soft: int, hard: int) -> Finding:
    name = f"ulimit {limit.option}"
    if soft == resource.RLIM_INFINITY:
        return ok(name, f"{limit.name}: unlimited")
    seen = f"{limit.name}: {soft // limit.unit}{limit.suffix}"
    if soft >= limit.good:
        return ok(name, seen)
    wanted = limit.good // limit.unit
    fix = f"ulimit {limit.option} {wanted}"
    if hard != resource.RLIM_INFINITY and hard < limit.good:
        fix += f" (as root; for good: /etc/security/limits.conf; Docker: --ulimit {_docker(limit)}={limit.good})"
    if soft < limit.least:
        return fail(name, seen, fix)
    return warn(name, f"{seen}: little for many ranks", fix)


def _docker(limit: Limit) -> str:
    return {"-n": "nofile", "-u": "nproc", "-s": "stack"}[limit.option]


def _locked_memory(soft: int, hard: int, infiniband: Path) -> Finding:
    """RDMA pins its buffers; without such a network nothing is pinned."""
    name = "ulimit -l"
    if soft == resource.RLIM_INFINITY:
        return ok(name, "locked memory: unlimited")
    seen = f"locked memory: {soft // 1024} kB"
    adapters = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    if not adapters:
        return ok(name, f"{seen}, no InfiniBand here that would need more")
    fix = "ulimit -l unlimited (for good: /etc/security/limits.conf; Docker: --ulimit memlock=-1)"
    return fail(name, f"{seen}; {', '.join(adapters)} need it unlimited", fix)


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / MEGABYTE:.0f} MB"
