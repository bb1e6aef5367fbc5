"""Check this machine: shared memory, folders that a run writes to, process limits, cores and threads, its own name."""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import statvfs_result
from pathlib import Path

from hvdtrain.doctor.checks import Check, Options, Result, fail, names_in, ok, warn
from hvdtrain.environment import LOG_DIR
from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores, cpu_quota
from hvdtrain.launch.installed_horovod import find_mpirun, installed_controllers
from hvdtrain.launch.running.log_folder import LOGS
from hvdtrain.worker.secret_files import deliver, withdraw

GROUP = "Machine"
MEGABYTE = 2**20
LEAST_FREE = 32 * MEGABYTE
"""Minimum free bytes. Open MPI uses a few MB per rank in shared memory, and NCCL some 10 MB per pair of GPUs."""
SMALL = 512 * MEGABYTE
"""Size in bytes below which to warn. Docker's default of 64 MB suffices for two ranks on CPUs, but not for NCCL on
many GPUs."""
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_SHM_FIX = (
    "in a container: --ipc=host or --shm-size=1g; else: mount -o remount,size=2g /dev/shm (as root)"
)
_FULL_FIX = "delete leftover files there (ls -l /dev/shm), or enlarge it; " + _SHM_FIX
THREAD_SETTINGS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
OWN_NAME = "own name"


def checks(options: Options) -> list[Check]:
    """Return the checks of this machine."""
    environ = options.environ

    def look_at_name() -> list[Result]:
        name = socket.gethostname()
        return [check_own_name(name, socket.gethostbyname, runs_over_mpi(environ))]

    looks: dict[str, Callable[[], Sequence[Result]]] = {
        "shared memory": lambda: [check_shared_memory(_SHM, os.statvfs)],
        # Those to which every run writes: logs, temporary files, and secret variables for its ranks.
        "folders": lambda: [
            check_log_folder(environ),
            check_temporary_folder(environ),
            check_private_folder(),
        ],
        "limits": lambda: check_limits(resource.getrlimit, _INFINIBAND),
        "threads": lambda: check_threads(environ, available_cores(), cpu_quota()),
        OWN_NAME: look_at_name,
    }
    return [Check(GROUP, name, look, options.quick) for name, look in looks.items()]


# Shared memory and folders


def check_shared_memory(folder: Path, statvfs: Callable[[Path], statvfs_result]) -> Result:
    """Check the size and free space of the folder through which the ranks of a host exchange data."""
    name = "shared memory"
    try:
        found = statvfs(folder)
    except OSError as error:
        fix = f"mount -t tmpfs -o size=2g,mode=1777 tmpfs {folder} (as root)"
        return fail(name, f"{folder}: {error.strerror}", fix)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    seen = f"{folder}: {_amount(free)} free of {_amount(size)}"
    if free < LEAST_FREE:
        return fail(name, seen, _FULL_FIX if size >= SMALL else _SHM_FIX)
    if why := write_error(folder):
        return fail(name, f"{folder}: {why}", f"chmod 1777 {folder} (as root)")
    if size < SMALL:
        return warn(name, f"{seen}: may be too little for many workers or GPUs", _SHM_FIX)
    return ok(name, seen)


def check_log_folder(environ: Mapping[str, str]) -> Result:
    """Check the folder that the user specified, or the one that a run creates in the working folder."""
    name = "log folder"
    named = environ.get(LOG_DIR)
    folder = Path(named or LOGS)
    why = write_error(folder)
    if why and named:
        fix = f"export {LOG_DIR}=... with a folder that you can write to, or unset it"
        return fail(name, f"{folder} ({LOG_DIR}): {why}", fix)
    if why:
        seen = f"{folder}: {why}; logs go to the temporary folder"
        fix = "start in a folder that you can write to, or choose another: hvdtrain run --log-dir"
        return warn(name, seen, fix)
    return ok(name, f"{folder} is writable")


def check_temporary_folder(environ: Mapping[str, str]) -> Result:
    """Check the folder of TMPDIR. If it is not writable, ranks do not start with MPI; Python silently uses another."""
    name = "temporary folder"
    variable = next((key for key in ("TMPDIR", "TEMP", "TMP") if environ.get(key)), None)
    folder = Path(environ[variable] if variable else "/tmp")
    seen = f"{folder} ({variable})" if variable else f"{folder}"
    if why := write_error(folder):
        fix = "export TMPDIR=... with a folder that you can write to"
        return fail(name, f"{seen}: {why}", fix)
    return ok(name, f"{seen} is writable")


def check_private_folder() -> Result:
    """Check the private folder of this user by using it as a launch with secret variables does."""
    name = "private folder"
    launch_id = f"doctor-{uuid.uuid4().hex}"
    try:
        deliver(launch_id, {})
    except HvdtrainError as error:
        return fail(name, str(error), "free space in /tmp, or make it writable: chmod 1777 /tmp")
    withdraw(launch_id)
    return ok(name, "secret variables can be stored for the workers")


def write_error(folder: Path) -> str:
    """Return why a file cannot be written in the folder, or where it would be created. Empty if it can.

    Permissions alone do not tell: there are quotas, and root may not be able to write to network file systems.
    """
    why = ""
    for place in (folder, *folder.parents):
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(64 * 1024))
            return ""
        except OSError as error:
            why = error.strerror or str(error)
            if not isinstance(error, FileNotFoundError) or place.exists():
                break
    return why


# Limits


@dataclass(frozen=True)
class Limit:
    """A limit of `ulimit`.

    Attributes:
        name: What it limits.
        kind: Constant of the module `resource`.
        option: Option of `ulimit`.
        docker: Name for docker run --ulimit.
        least: Value below which training does not work.
        good: Value below which large jobs do not work.
        unit: Number of bytes or items in the unit that `ulimit` uses.
        suffix: Name of that unit.
    """

    name: str
    kind: int
    option: str
    docker: str
    least: int
    good: int
    unit: int
    suffix: str


LIMITS = (
    # Each rank opens one or two sockets per other rank, and TensorFlow a file per reader.
    Limit("open files", resource.RLIMIT_NOFILE, "-n", "nofile", 256, 1024, 1, ""),
    # A rank has some 20 threads, plus as many as its cores in each of three pools.
    Limit("processes", resource.RLIMIT_NPROC, "-u", "nproc", 256, 2048, 1, ""),
    Limit("stack", resource.RLIMIT_STACK, "-s", "stack", MEGABYTE, 4 * MEGABYTE, 1024, " kB"),
)


def check_limits(getrlimit: Callable[[int], tuple[int, int]], infiniband: Path) -> Sequence[Result]:
    """Check the limits on files, processes and stack, and on locked memory if /sys (`infiniband`) lists adapters."""
    results = [_check_limit(limit, *getrlimit(limit.kind)) for limit in LIMITS]
    return [*results, _check_locked_memory(getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband)]


def _check_limit(limit: Limit, soft: int, hard: int) -> Result:
    name = f"ulimit {limit.option}"
    if soft == resource.RLIM_INFINITY:
        return ok(name, f"{limit.name}: unlimited")
    seen = f"{limit.name}: {soft // limit.unit}{limit.suffix}"
    if soft >= limit.good:
        return ok(name, seen)
    fix = f"ulimit {limit.option} {limit.good // limit.unit}"
    if hard != resource.RLIM_INFINITY and hard < limit.good:
        docker = f"Docker: --ulimit {limit.docker}={limit.good}"
        fix += f" (as root; permanently: /etc/security/limits.conf; {docker})"
    if soft < limit.least:
        return fail(name, seen, fix)
    return warn(name, f"{seen}: may be too low for many workers", fix)


def _check_locked_memory(soft: int, infiniband: Path) -> Result:
    """Check the limit on locked memory, which matters only to RDMA networks, as they pin their buffers."""
    name = "ulimit -l"
    if soft == resource.RLIM_INFINITY:
        return ok(name, "locked memory: unlimited")
    seen = f"locked memory: {soft // 1024} kB"
    adapters = names_in(infiniband)
    if not adapters:
        return ok(name, f"{seen}, enough without InfiniBand")
    fix = (
        "ulimit -l unlimited (permanently: /etc/security/limits.conf; Docker: --ulimit memlock=-1)"
    )
    return fail(name, f"{seen}; {', '.join(adapters)} need it unlimited", fix)


# Cores and threads


def check_threads(
    environ: Mapping[str, str], affinity: int, quota: float | None
) -> Sequence[Result]:
    """Check cores and thread settings. `hvdtrain run` shares a host's cores among its ranks, but keeps user settings.

    Args:
        environ: Environment of a launch.
        affinity: Number of cores in this process's affinity mask.
        quota: CPU quota of its control group in cores. None without a limit.
    """
    return [check_cores(environ, affinity, quota), check_thread_settings(environ, affinity)]


def check_cores(environ: Mapping[str, str], affinity: int, quota: float | None) -> Result:
    """Check that the CPU quota covers the cores in the affinity mask."""
    name = "cores"
    # A difference of half a core counts as rounding by the container's administrator.
    if quota is None or quota + 0.5 >= affinity:
        return ok(name, f"{affinity}")
    seen = f"{affinity} in the affinity mask, but the CPU quota of the container is {quota:g}"
    if any(setting in environ for setting in THREAD_SETTINGS):
        return ok(name, f"{seen}; the environment sets the threads")
    share = max(1, int(quota))
    fix = "give it whole cores (docker run --cpuset-cpus), or set the threads per worker: "
    return warn(name, seen, fix + " ".join(f"{setting}={share}" for setting in THREAD_SETTINGS))


def check_thread_settings(environ: Mapping[str, str], cores: int) -> Result:
    """Check that the environment does not set more threads than there are cores."""
    name = "thread settings"
    given = {setting: environ[setting] for setting in THREAD_SETTINGS if setting in environ}
    if not given:
        return ok(name, "none: hvdtrain run shares the cores among the workers of a host")
    seen = ", ".join(f"{setting}={value}" for setting, value in given.items())
    threads = {setting: _threads(setting, value) for setting, value in given.items()}
    wrong = [setting for setting, number in threads.items() if number is None]
    if wrong:
        bad = ", ".join(f"{setting}={given[setting]}" for setting in wrong)
        return fail(name, f"not a number: {bad}", f"unset {' '.join(wrong)}")
    if 0 in threads.values():
        return warn(name, f"{seen}: 0 gives every worker all cores", f"unset {' '.join(given)}")
    if any((number or 0) > cores for number in threads.values()):
        return warn(name, f"{seen}: more than the {cores} cores", f"unset {' '.join(given)}")
    return ok(name, seen)


def _threads(setting: str, value: str) -> int | None:
    """Parse the number of threads of a setting. None if it is invalid.

    OpenMP accepts a list, `2,1`, with a number per nesting level, of which the first is a rank's own.
    """
    pattern = r"\s*(\d+)\s*(,\s*\d+\s*)*" if setting == "OMP_NUM_THREADS" else r"(\d+)"
    found = re.fullmatch(pattern, value, re.ASCII)
    return int(found[1]) if found else None


# Name


def runs_over_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether a launch here can use MPI, which is preferred."""
    try:
        built = installed_controllers()
    except HvdtrainError:
        return False
    return "mpi" in built and find_mpirun(environ.get("PATH")) is not None


def check_own_name(name: str, resolve: Callable[[str], object], over_mpi: bool) -> Result:
    """Check that this machine's name has an address. Without one, ranks crash over Gloo but run over MPI."""
    try:
        resolve(name)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        seen = f"{name} has no address ({why}): workers crash over Gloo"
        fix = f"add it to /etc/hosts: echo '127.0.0.1 {name}' | sudo tee -a /etc/hosts"
        return (
            warn(OWN_NAME, f"{seen}, but not over MPI", fix)
            if over_mpi
            else fail(OWN_NAME, seen, fix)
        )
    return ok(OWN_NAME, f"{name} has an address")


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / MEGABYTE:.0f} MB"
