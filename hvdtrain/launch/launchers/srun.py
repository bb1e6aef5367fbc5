"""The srun launcher, for Slurm jobs: express a plan as srun's options.

srun needs no ssh between the nodes, and its processes belong to the job: `scancel` and the time
limit end them on every node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.installed_horovod import Controller
from hvdtrain.launch.launch_command import LaunchCommand, Site, forwarding_variable, rank_settings
from hvdtrain.launch.launchers.horovodrun import horovodrun_options
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import rank_command
from hvdtrain.launch.running.process_names import RANKS_OF_SRUN
from hvdtrain.launch.slurm.allocation import Allocation

STEP_SECONDS = 300
"""Default time for srun to start the ranks, without --start-timeout. Nodes newly assigned to a job
may still be being prepared."""
_PYTHON_OF_IMAGE = "python3"


def prepare(plan: LaunchPlan, site: Site) -> LaunchCommand:
    """Prepare `python -m hvdtrain.start.run_srun HOROVODRUN-OPTIONS srun SRUN-OPTIONS COMMAND`.

    `hvdtrain.start.run_srun` accepts horovodrun's options, with the same meaning. It also serves the rendezvous for
    Gloo, so srun alone could not start the ranks.
    """
    assert site.allocation is not None
    if site.image is not None:
        plan = replace(plan, program=replace(plan.program, python=_PYTHON_OF_IMAGE))
    return LaunchCommand(
        words=(
            *(sys.executable, "-P", "-m", "hvdtrain.start.run_srun"),
            *horovodrun_options(plan),
            *srun_argv(plan, site.allocation),
            *_task_command(plan, site),
        ),
        settings={**rank_settings(plan, site.environ), **forwarding_variable(plan)},
        process_names=RANKS_OF_SRUN,
    )


def _task_command(plan: LaunchPlan, site: Site) -> list[str]:
    """Return the command of each srun task, preceded by the options that srun needs for a container.

    Apptainer runs images that are `*.sif` files or URLs (`docker://...`). All others are left to srun's pyxis plugin,
    which accepts image names and `*.sqsh`.
    """
    worker, start = rank_command(plan.program), ("-P", "-m", "hvdtrain.start.slurm_task")
    image, folder = site.image, site.folder
    if image is not None and (image.endswith(".sif") or "://" in image):
        bind = ["--bind", folder, "--pwd", folder]
        return [sys.executable, *start, "apptainer", "exec", "--nv", *bind, image, *worker]
    task = [plan.program.python, *start, *worker]
    if image is None:
        return task
    mount = f"--container-mounts={folder}:{folder}"
    return [f"--container-image={image}", mount, f"--container-workdir={folder}", *task]


def srun_argv(plan: LaunchPlan, allocation: Allocation) -> list[str]:
    """Return srun with its options: the placement of the ranks, and ending all when one fails.

    By default, srun waits indefinitely for nodes whose cores are held by another step. Inside a step,
    that is the user's own shell, and the ranks share its cores.
    """
    hosts = used_hosts(plan.hosts, plan.np)
    return [
        "srun",
        *_layout(hosts, allocation),
        *_cores(hosts, allocation),
        *(["--overlap"] if allocation.in_step else []),
        f"--immediate={plan.start_timeout or STEP_SECONDS}",
        # MPI gets its ranks from PMIx; Gloo gets them from the rendezvous of hvdtrain.start.run_srun.
        f"--mpi={'pmix' if plan.controller == 'mpi' else 'none'}",
        "--export=ALL",
        "--input=0",  # Standard input goes to rank 0.
        "--kill-on-bad-exit=1",
    ]


def choose_launcher(wanted: str, allocation: Allocation | None, hosts: Sequence[Host]) -> str:
    """Return the requested launcher. `auto` is srun if ranks run on other nodes of an allocation, else horovodrun.

    Raises:
        UsageError: srun is requested outside of a Slurm job, or for hosts that are not in it.
    """
    if wanted not in {"auto", "srun"}:
        return wanted
    if allocation is None:
        if wanted == "srun":
            raise UsageError(
                "--launcher srun works only inside a Slurm job: start it with sbatch, salloc or "
                "hvdtrain submit"
            )
        return "horovodrun"
    names = {host.name for host in hosts}
    strangers = sorted(names - {host.name for host in allocation.hosts})
    if wanted == "srun":
        if strangers:
            raise UsageError(
                f"{', '.join(strangers)}: not a node of job {allocation.job_id}, which has "
                f"{', '.join(map(str, allocation.hosts))}: srun can start workers only on those"
            )
        return "srun"
    return "horovodrun" if strangers or names <= {allocation.this_node} else "srun"


def choose_srun_controller(wanted: str, built: frozenset[Controller]) -> Controller:
    """Return the controller for ranks started by srun. `auto` prefers Gloo.

    Gloo has no requirements, whereas MPI needs a Slurm with PMIx and an MPI with the same PMIx.
    """
    if wanted == "auto":
        return "gloo" if "gloo" in built else "mpi"
    return "mpi" if wanted == "mpi" else "gloo"


def used_hosts(hosts: Sequence[Host], np: int) -> tuple[Host, ...]:
    """Return the hosts that `np` ranks use, filled in order, with the number of ranks as their slots."""
    used = []
    for host in hosts:
        if np > 0:
            used.append(Host(host.name, min(host.slots, np)))
        np -= host.slots
    return tuple(used)


def _layout(hosts: Sequence[Host], allocation: Allocation) -> list[str]:
    """Return the options that place the ranks on the nodes, in the order of `hosts`."""
    tasks = sum(host.slots for host in hosts)
    counts = {host.slots for host in hosts}
    size = [f"--nodes={len(hosts)}", f"--ntasks={tasks}"]
    order = [host.name for host in hosts]
    # In a block distribution, srun takes the nodes in the allocation's order.
    if len(counts) == 1 and order == [h.name for h in allocation.hosts if h.name in order]:
        names = ",".join(order)
        each = f"--ntasks-per-node={counts.pop()}"
        return [*size, each, f"--nodelist={names}", "--distribution=block"]
    # A node is listed once for each of its tasks.
    names = ",".join(host.name for host in hosts for _ in range(host.slots))
    return [*size, f"--nodelist={names}", "--distribution=arbitrary"]


def _cores(hosts: Sequence[Host], allocation: Allocation) -> list[str]:
    """Options for cores: srun does not adopt the job's cores per task, and rejects more tasks than cores."""
    have = {
        host.name: cores for host, cores in zip(allocation.hosts, allocation.cores, strict=True)
    }
    each = allocation.cores_per_task
    if any(host.slots * (each or 1) > have.get(host.name, 0) for host in hosts):
        return ["--overcommit"]
    return [f"--cpus-per-task={each}"] if each else []
