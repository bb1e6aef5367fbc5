"""horovodrun, on this machine and over ssh: the plan as its options.

Horovod's own launcher is what runs, in a process that knows what Horovod was built with and which variables may travel:
`hvdtrain.start.horovodrun` takes horovodrun's arguments, and starts the ranks four seconds sooner.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from hvdtrain.environment import HASH_SEED
from hvdtrain.launch.command import Prepared, Site, forward, rank_settings
from hvdtrain.launch.horovodrun import horovodrun_options
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.program import rank_command

_STAND_IN = (sys.executable, "-P", "-m", "hvdtrain.start.horovodrun")
_WAITS = (
    "pasted, horovodrun waits until the discovery names two hosts, unless it is given --network-interfaces: "
    "hvdtrain run does not"
)
_SHOWS = (
    "pasted, horovodrun --gloo puts all variables of your shell into command lines, which every user of the hosts can "
    "read: hvdtrain run does not"
)


def prepare(plan: LaunchPlan, site: Site) -> Prepared:
    """`horovodrun OPTIONS python -m hvdtrain.worker SCRIPT...`."""
    elsewhere = plan.elastic or any(host.name not in site.names for host in plan.hosts)
    if elsewhere and plan.controller == "mpi":
        plan = _with_prefix(plan, site.mpi_prefix)
    lacks = []
    if plan.host_discovery_script and not plan.network_interfaces:
        lacks.append(_WAITS)
    if elsewhere and plan.controller == "gloo":
        lacks.append(_SHOWS)
    return Prepared(
        words=(site.horovodrun, *horovodrun_options(plan), *rank_command(plan.program)),
        settings=_of_mpi(plan, site) | rank_settings(plan, site.environ),
        stand_in=_STAND_IN,
        # The ranks set the seed themselves where it is not set, which costs them a second start of Python.
        for_stand_in={HASH_SEED: site.environ.get(HASH_SEED, "0"), **forward(plan)},
        lacks=tuple(lacks),
        elastic=plan.elastic,
    )


def _with_prefix(plan: LaunchPlan, prefix: str) -> LaunchPlan:
    """ssh starts with a bare PATH, in which the other hosts' part of Open MPI is not found."""
    given = plan.mpi_args or ""
    if not prefix or "--prefix" in given:
        return plan
    return replace(plan, mpi_args=f"{given} --prefix {shlex.quote(prefix)}".strip())


def _of_mpi(plan: LaunchPlan, site: Site) -> dict[str, str | None]:
    """What mpirun needs in its environment."""
    if plan.controller != "mpi":
        return {}
    # A rank that waits for a message polls; where ranks fill the cores, it polls on a core that another one needs
    # (see `hvdtrain.runtime` for the figures).
    settings: dict[str, str | None] = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    path = site.environ.get("PATH", "")
    # horovodrun takes mpirun from PATH, which lacks it when the environment is not activated.
    if site.mpirun and str(Path(site.mpirun).parent) not in path.split(os.pathsep):
        settings["PATH"] = f"{Path(site.mpirun).parent}{os.pathsep}{path}"
    return settings
