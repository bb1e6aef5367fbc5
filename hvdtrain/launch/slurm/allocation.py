"""Read a Slurm allocation from the variables that Slurm sets in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.slurm.nodelist import expand_counts, expand_nodes

_VARIABLES = {
    "job": "SLURM_JOB_ID",
    "nodes": "SLURM_JOB_NODELIST",
    # Set only if the job requested tasks; TASKS_PER_NODE is always set, by default to the cores.
    "tasks": "SLURM_NTASKS",
    "tasks per node": "SLURM_NTASKS_PER_NODE",
    "layout": "SLURM_TASKS_PER_NODE",
    "cores": "SLURM_JOB_CPUS_PER_NODE",
    "cores per task": "SLURM_CPUS_PER_TASK",
    # As requested (`a100:4`), and those of the node where the job's script runs.
    "gpus per node": "SLURM_GPUS_PER_NODE",
    "gpus here": "SLURM_GPUS_ON_NODE",
    # Only inside a step (srun).
    "step": "SLURM_STEP_ID",
    "tasks of step": "SLURM_STEP_NUM_TASKS",
    "task": "SLURM_PROCID",
    # Only in a step with --pty, which runs its command in its first task alone.
    "terminal of step": "SLURM_PTY_PORT",
    # Only in a heterogeneous job.
    "components": "SLURM_HET_SIZE",
    # Only on a node of the allocation: salloc may leave the user on a login node.
    "this node": "SLURMD_NODENAME",
}


@dataclass(frozen=True)
class Allocation:
    """The nodes that Slurm allocated to a job.

    Attributes:
        job_id: ID of the job.
        hosts: Nodes in Slurm's order, each with its number of ranks.
        cores: Number of cores of each node, in the same order.
        cores_per_task: Number of cores per task, if the job requested it.
        this_node: Node where this process runs; None outside of the allocation.
        in_step: Whether this process runs inside a step, which holds its cores.
    """

    job_id: str
    hosts: tuple[Host, ...]
    cores: tuple[int, ...]
    cores_per_task: int | None
    this_node: str | None
    in_step: bool = False


def read_allocation(environ: Mapping[str, str], *, own_hosts: bool = False) -> Allocation | None:
    """Read the allocation around this process. Returns None outside of Slurm.

    A node takes as many ranks as the job requested tasks there, otherwise as it has GPUs, otherwise one.

    Args:
        environ: Environment of this process.
        own_hosts: Whether the user names the hosts, and not for srun. If so, a heterogeneous job, whose
            components srun does not start together, also returns None.

    Raises:
        UsageError: A variable is invalid, the job is heterogeneous, or srun started this process as one of several.
    """
    job_id = environ.get(_VARIABLES["job"])
    if job_id is None:
        return None
    if (_number(environ, "components") or 1) > 1:
        if own_hosts:
            return None
        raise UsageError(
            f"{_VARIABLES['components']}={environ[_VARIABLES['components']]}: srun would start workers only "
            "in one component of this heterogeneous job: name the hosts with -H, to use ssh, or request a "
            "job with one component"
        )
    in_terminal = _VARIABLES["terminal of step"] in environ and _number(environ, "task") == 0
    if (_number(environ, "tasks of step") or 1) > 1 and not in_terminal:
        raise UsageError(
            f"srun started this command as {environ[_VARIABLES['tasks of step']]} tasks: start it once, "
            "without srun; it starts the workers on all nodes itself"
        )
    names = _nodes(environ)
    return Allocation(
        job_id=job_id,
        hosts=tuple(map(Host, names, _slots(environ, len(names)))),
        cores=_counts(environ, "cores", len(names)) or (1,) * len(names),
        cores_per_task=_number(environ, "cores per task"),
        this_node=environ.get(_VARIABLES["this node"]),
        in_step=_VARIABLES["step"] in environ,
    )


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = environ.get(_VARIABLES["nodes"])
    if text is None:
        raise UsageError(
            f"{_VARIABLES['job']} is set but {_VARIABLES['nodes']} is not: the Slurm environment is "
            f"incomplete. Unset {_VARIABLES['job']}, or run inside a job"
        )
    try:
        return expand_nodes(text)
    except UsageError as error:
        raise UsageError(f"{_VARIABLES['nodes']}: {error}") from None


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    """Return the number of ranks for each node."""
    layout = _counts(environ, "layout")
    if _VARIABLES["step"] in environ and layout and len(layout) != nodes:
        # In a step, the layout and the number of tasks are the step's, which may have fewer nodes than the job.
        of_step = {_VARIABLES["layout"], _VARIABLES["tasks"]}
        environ = {name: value for name, value in environ.items() if name not in of_step}
    tasks = _number(environ, "tasks")
    each = _number(environ, "tasks per node")
    if tasks is None and each is None:
        return (_gpus_per_node(environ) or 1,) * nodes
    layout = _counts(environ, "layout", nodes)
    if layout and (tasks is None or sum(layout) == tasks):
        return layout
    if each:
        return (each,) * nodes
    assert tasks is not None
    if tasks < nodes:
        raise UsageError(
            f"{_VARIABLES['tasks']}={tasks} is fewer than one task per node ({nodes} nodes): request at least "
            "one per node, or name the hosts with -H"
        )
    return tuple(tasks // nodes + (index < tasks % nodes) for index in range(nodes))


def _gpus_per_node(environ: Mapping[str, str]) -> int:
    """Parse the GPUs of each node: `4`, `a100:4` or `a100:2,v100:1`. Returns 0 if unknown."""
    text = environ.get(_VARIABLES["gpus per node"])
    if text is None:
        return _number(environ, "gpus here") or 0
    numbers = [re.fullmatch(r"(?:[^:,]*:)*(\d{1,18})", item, re.ASCII) for item in text.split(",")]
    if not all(numbers):
        raise _wrong(environ, "gpus per node", "a number, or type:number")
    return sum(int(match[1]) for match in numbers if match)


def _counts(
    environ: Mapping[str, str], what: str, nodes: int | None = None
) -> tuple[int, ...] | None:
    text = environ.get(_VARIABLES[what])
    if text is None:
        return None
    try:
        counts = expand_counts(text)
    except UsageError as error:
        raise UsageError(f"{_VARIABLES[what]}: {error}") from None
    if nodes is not None and len(counts) != nodes:
        raise UsageError(
            f"{_VARIABLES[what]}={text} describes {len(counts)} nodes, but "
            f"{_VARIABLES['nodes']}={environ[_VARIABLES['nodes']]} names {nodes}"
        )
    return counts


def _number(environ: Mapping[str, str], what: str) -> int | None:
    text = environ.get(_VARIABLES[what])
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise _wrong(environ, what, "a number")
    return int(text)


def _wrong(environ: Mapping[str, str], what: str, expected: str) -> UsageError:
    name = _VARIABLES[what]
    return UsageError(f"{name}={environ[name]!r}: expected {expected}")
