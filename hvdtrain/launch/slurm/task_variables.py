"""Translate the variables that Slurm sets for a task of srun to Horovod's.

Horovod reads its rank and size from the environment, where horovodrun and mpirun set them; srun uses its own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.slurm.nodelist import expand_counts

LONGEST = 40
"""Maximum number of characters of a value in a message."""


def task_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to the environment of a task that may use this number of cores.

    Ranks have the numbers of Slurm's tasks. The cross rank and size count the nodes that have a rank
    with this local rank.

    Raises:
        HvdtrainError: This process is not a task of srun.
    """
    node, local, rank = (
        _needed_number(environ, name) for name in ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID")
    )
    counts = expand_counts(_needed(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if not (node < len(counts) and local < counts[node]):
        raise _no_task(
            f"SLURM_NODEID={node} and SLURM_LOCALID={local} are no task of "
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']}"
        )
    peers = [index for index, count in enumerate(counts) if count > local]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(sum(counts)),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(counts[node]),
        "HOROVOD_CROSS_RANK": str(peers.index(node)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        "HOROVOD_HOSTNAME": _needed(environ, "SLURMD_NODENAME"),
        RANK_CORES: str(_share(environ, cores, counts[node])),
    }


def _share(environ: Mapping[str, str], cores: int, tasks: int) -> int:
    """Return the number of cores of one task, at least 1.

    A task that Slurm bound to cores has them to itself; unbound tasks of a node share the job's cores
    there.
    """
    if asked := _number(environ, "SLURM_CPUS_PER_TASK"):
        return min(cores, asked)
    of_job = _number(environ, "SLURM_CPUS_ON_NODE") or cores
    return max(1, cores if cores < of_job else min(cores, of_job) // tasks)


def _needed(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise _no_task(f"{name} is not set")
    return environ[name]


def _needed_number(environ: Mapping[str, str], name: str) -> int:
    text = _needed(environ, name)
    number = _number(environ, name)
    if number is None:
        raise _no_task(f"{name}={text[:LONGEST]!r} is not a number")
    return number


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable's number; None if there is none, or one too long to be anything's."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def _no_task(why: str) -> HvdtrainError:
    return HvdtrainError(
        f"hvdtrain.start.slurm_task runs as a task of srun, which sets SLURM_* variables: {why}"
    )
