"""Translate the variables that Slurm sets for a task of srun to Horovod's.

Horovod reads its rank and size from the environment, where horovodrun and mpirun set them; srun uses its own names.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.slurm.nodelist import expand_counts


def task_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to the environment of a task.

    Ranks have the numbers of Slurm's tasks. The cross rank and size count the nodes that have a rank
    with this local rank.

    Args:
        environ: Environment of the task.
        cores: Number of cores in the task's affinity mask.

    Raises:
        HvdtrainError: This process is not a task of srun.
    """
    try:
        node, local = int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"])
        rank = environ["SLURM_PROCID"]
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        name = environ["SLURMD_NODENAME"]
    except (KeyError, ValueError) as error:
        raise HvdtrainError(
            f"hvdtrain.start.slurm_task runs as a task of srun, which sets SLURM_* variables: {error}"
        ) from error
    peers = [index for index, count in enumerate(counts) if count > local]
    return {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": str(sum(counts)),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(counts[node]),
        "HOROVOD_CROSS_RANK": str(peers.index(node)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        "HOROVOD_HOSTNAME": name,
        RANK_CORES: str(_share(environ, cores, counts[node])),
    }


def _share(environ: Mapping[str, str], cores: int, tasks: int) -> int:
    """Return the number of cores of one task, at least 1.

    A task that Slurm bound to cores has them to itself; unbound tasks of a node share the job's cores
    there.
    """
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal() and int(asked) > 0:
        return min(cores, int(asked))
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    of_job = int(on_node) if on_node.isdecimal() and int(on_node) > 0 else cores
    return max(1, cores if cores < of_job else min(cores, of_job) // tasks)
