"""What a rank sets in its environment before TensorFlow is loaded.

TensorFlow and OpenMP each start as many threads as the machine has cores, in every rank. Two ranks
on two cores then run four compute threads, and the ranks wait for each other's time slices:
dividing the cores between the ranks of a host is worth up to a factor of two. Everything here is a
default: what the user has set already stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES, STALL_DEFAULTS

_LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Slurm's own name counts only in a task that Slurm started as a rank of an MPI job.
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def rank_of(environ: Mapping[str, str]) -> int:
    """This process's rank as its launcher (horovodrun, mpirun) tells it; 0 without one."""
    return _first_number(environ, _RANK_VARIABLES, 0)


def size_of(environ: Mapping[str, str]) -> int:
    """The number of ranks as the launcher tells it; 1 without one."""
    names: tuple[str, ...] = _SIZE_VARIABLES
    if "PMIX_RANK" in environ:
        names = (*names, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return _first_number(environ, names, 1)


def available_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to `environ`; none that is set there already.

    `cores` are those that all ranks of this host share. Each rank computes with an equal share, at
    least one, or with as many as its launcher says are its own. More inter-op threads than cores
    cost time: with 2 in place of 1, two ranks on two cores were 1.05 to 1.4 times slower on a small
    network. Collectives need no thread to wait in.
    """
    equal = cores // max(1, _first_number(environ, _LOCAL_SIZE_VARIABLES, 1))
    share = max(1, _first_number(environ, (RANK_CORES,), equal))
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(share),
        **STALL_DEFAULTS,
    }
    return {name: value for name, value in defaults.items() if name not in environ}


def _first_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return default
