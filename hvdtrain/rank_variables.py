"""Environment variables in which launchers pass a process its rank, used by the launcher and the trainer.

horovodrun over Gloo, and hvdtrain under srun, set HOROVOD_*; Open MPI's mpirun sets OMPI_COMM_WORLD_*; MPICH's and
Slurm's PMI set PMI_*, and PMIx sets PMIX_*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdtrain.environment import LAUNCH_ID, LOG_DIR, TERMINAL
from hvdtrain.strategy_names import STRATEGY

CONTROLLER = "HOROVOD_CONTROLLER"
"""How ranks coordinate (mpi or gloo). Exported before a launch, it sets the default of --controller."""

CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
"""What moves tensors between CPUs (mpi or gloo). Horovod crashes where this is not what CONTROLLER is."""

RENDEZVOUS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
"""Address at which the ranks of a launch over Gloo find each other."""

GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
"""Network interface at which a rank listens for the others of a launch over Gloo."""

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# PMIx has no variable for the size, so Slurm's is used; by itself it proves nothing, since batch scripts have it too.
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_PLACE = re.compile(
    rf"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|ELASTIC|GLOO_(RENDEZVOUS_.*|IFACE))|{CONTROLLER}|{CPU_OPERATIONS}"
    r"|(OMPI_COMM|PMIX|PMI)_.*|MPI_LOCAL(NRANKS|RANKID)"
)
_OF_THE_LAUNCH = frozenset({LAUNCH_ID, LOG_DIR, TERMINAL, STRATEGY, "TF_CONFIG"})


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has given this process, or one of its ancestors, a rank."""
    return any(name in environ for name in _RANKS)


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an elastic job, whose number of ranks may change."""
    return "HOROVOD_ELASTIC" in environ


def slot_of(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return a key that no other rank on this host has.

    It is ("", rank), or (hostname, local rank) in an elastic job, where a process's rank may change.
    """
    if not is_elastic(environ):
        return "", rank_of(environ)
    return environ.get("HOROVOD_HOSTNAME", ""), _first_number(environ, ("HOROVOD_LOCAL_RANK",), 0)


def rank_of(environ: Mapping[str, str]) -> int:
    """Return this process's rank, from its launcher's variables; 0 without a launcher."""
    return _first_number(environ, _RANKS, 0)


def size_of(environ: Mapping[str, str]) -> int:
    """Return the number of ranks, from the launcher's variables; 1 without a launcher."""
    return _first_number(environ, (*_SIZES, *_slurm_sizes(environ)), 1)


def local_size_of(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, from the launcher's variables; 1 without a launcher."""
    return _first_number(environ, _LOCAL_SIZES, 1)


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, as far as the launcher's variables tell."""
    pairs = zip(_LOCAL_SIZES[:2], _SIZES[:2], strict=True)
    return any(local in environ and environ[local] == environ.get(all_) for local, all_ in pairs)


def size_variable(environ: Mapping[str, str]) -> str:
    """Return the name of a variable that shows that this process is one of several ranks; empty if none does.

    PMI's variables do not count in a Slurm step: whether a shell there is one of several tasks is read from Slurm's
    own variables.
    """
    of_slurm = "SLURM_STEP_ID" in environ
    names = [name for name in _SIZES if not (of_slurm and name.startswith("PMI_"))]
    return next((name for name in names if _first_number(environ, (name,), 1) > 1), "")


def is_rank_variable(name: str) -> bool:
    """Whether a launcher sets the variable `name` to tell a process its rank or its peers."""
    return _PLACE.fullmatch(name) is not None


def is_of_launch(name: str) -> bool:
    """Whether a launch sets the variable `name` itself: one value from the user for all ranks would break it."""
    return name in _OF_THE_LAUNCH or is_rank_variable(name)


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that make a process a rank."""
    return {name: value for name, value in environ.items() if not is_rank_variable(name)}


def _slurm_sizes(environ: Mapping[str, str]) -> tuple[str, ...]:
    return _SLURM_SIZES if "PMIX_RANK" in environ else ()


def _first_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if _NUMBER.fullmatch(environ.get(name, "")):
            return int(environ[name])
    return default
