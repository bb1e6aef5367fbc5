"""srun, in a Slurm job: the plan as its options.

srun needs no ssh between the nodes, and what it starts belongs to the job: `scancel` and the time
limit end it on every node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.installed_horovod import Controller
from hvdtrain.launch.launch_command import Prepared, Site, forward, rank_settings
from hvdtrain.launch.launchers.horovodrun import horovodrun_options
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import rank_command
from hvdtrain.launch.running.process_names import RANKS_OF_SRUN
from hvdtrain.launch.slurm.allocation import Allocation

STEP_SECONDS = 300
"""How long srun may wait to start the ranks if --start-timeout does not say: nodes that a job has just
got may still be prepared for it."""
_PYTHON_OF_IMAGE = "python3"


def prepare(plan: LaunchPlan, site: Site) -> Prepared:
    """`python -m hvdtrain.start.run_srun HOROVODRUN-OPTIONS srun SRUN-OPTIONS COMMAND`.

    `hvdtrain.start.run_srun` takes what horovodrun takes, so that all its options mean the same here. Over Gloo
    the ranks meet at it, so that srun alone could not start them.
    """
    assert site.allocation is not None
    if site.image is not None:
        plan = replace(plan, program=replace(plan.program, python=_PYTHON_OF_IMAGE))
    return Prepared(
        words=(
            *(sys.executable, "-P", "-m", "hvdtrain.start.run_srun"),
            *horovodrun_options(plan),
            *srun_argv(plan, site.allocation),
            *_task_command(plan, site),
        ),
        settings={**rank_settings(plan, site.environ), **forward(plan)},
        process_names=RANKS_OF_SRUN,
    )


def _task_command(plan: LaunchPlan, site: Site) -> list[str]:
    """What each task of srun runs, and before it the options of srun that a container needs.

    Apptainer runs images that are files `*.sif` or have a scheme in front (`docker://...`); all others are for the
    pyxis plugin of srun, which takes image names and `*.sqsh`.
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
    """srun with its options: the ranks' places, and that the end of one is the end of all.

    By itself srun waits without end for nodes whose cores another step holds. Inside of a step that
    is the user's own shell, whose cores the ranks share.
    """
    hosts = used_hosts(plan.hosts, plan.np)
    return [
        "srun",
        *_layout(hosts),
        *_cores(hosts, allocation),
        *(["--overlap"] if allocation.in_step else []),
        f"--immediate={plan.start_timeout or STEP_SECONDS}",
        # PMIx gives MPI its ranks; over Gloo the rendezvous of hvdtrain.start.run_srun does.
        f"--mpi={'pmix' if plan.controller == 'mpi' else 'none'}",
        "--export=ALL",
        "--input=0",  # Rank 0 reads what the launch is given.
        "--kill-on-bad-exit=1",
    ]


def choose_launcher(wanted: str, allocation: Allocation | None, hosts: Sequence[Host]) -> str:
    """The requested launcher; else srun if ranks run on other nodes of an allocation, else horovodrun.

    Raises UsageError if srun is wanted where it cannot work.
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
    """The controller of ranks that srun starts; `auto` is Gloo.

    Over Gloo nothing has to fit together. MPI needs a Slurm with PMIx and an MPI with the same PMIx.
    """
    if wanted == "auto":
        return "gloo" if "gloo" in built else "mpi"
    return "mpi" if wanted == "mpi" else "gloo"


def used_hosts(hosts: Sequence[Host], np: int) -> tuple[Host, ...]:
    """The hosts, filled in order, that `np` ranks use, with the ranks of each."""
    used = []
    for host in hosts:
        if np > 0:
            used.append(Host(host.name, min(host.slots, np)))
        np -= host.slots
    return tuple(used)


def _layout(hosts: Sequence[Host]) -> list[str]:
    """Which rank is where."""
    tasks = sum(host.slots for host in hosts)
    counts = {host.slots for host in hosts}
    size = [f"--nodes={len(hosts)}", f"--ntasks={tasks}"]
    if len(counts) == 1:
        names = ",".join(host.name for host in hosts)
        each = f"--ntasks-per-node={counts.pop()}"
        return [*size, each, f"--nodelist={names}", "--distribution=block"]
    # A node is named once for each of its tasks.
    names = ",".join(host.name for host in hosts for _ in range(host.slots))
    return [*size, f"--nodelist={names}", "--distribution=arbitrary"]


def _cores(hosts: Sequence[Host], allocation: Allocation) -> list[str]:
    """srun does not take over the job's cores per task, and refuses more tasks than there are cores."""
    have = {
        host.name: cores for host, cores in zip(allocation.hosts, allocation.cores, strict=True)
    }
    each = allocation.cores_per_task
    if any(host.slots * (each or 1) > have.get(host.name, 0) for host in hosts):
        return ["--overcommit"]
    return [f"--cpus-per-task={each}"] if each else []
