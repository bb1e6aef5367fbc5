"""What a task of srun is to Horovod: Slurm's variables in, Horovod's out.

Horovod asks its environment for its place, which horovodrun and mpirun set there; srun sets its own names.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.slurm.nodelist import expand_counts


def task_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables to add to those of a task.

    Ranks are numbered as Slurm numbers tasks. The cross rank and size count the nodes that have a
    rank of this local number.

    Args:
        environ: of the task.
        cores: those that the task may run on (its affinity mask).

    Raises:
        HvdtrainError: this is no task of srun.
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
    """The cores of one task, at least 1.

    A task that Slurm bound has its cores to itself; the tasks of a node that are not bound all run
    on the job's cores there.
    """
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal() and int(asked) > 0:
        return min(cores, int(asked))
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    of_job = int(on_node) if on_node.isdecimal() and int(on_node) > 0 else cores
    return max(1, cores if cores < of_job else min(cores, of_job) // tasks)
