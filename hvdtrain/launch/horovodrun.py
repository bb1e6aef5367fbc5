"""LaunchPlan -> the command that runs it. Pure functions: what is printed is what runs."""

import os
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.launch.engine import Engine
from hvdtrain.launch.plan import LaunchPlan


def launch_argv(plan: LaunchPlan, engine: Engine, environment: Mapping[str, str]) -> list[str]:
    """The complete command: `env NAME=VALUE horovodrun ... python -m hvdtrain.worker script ...`."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return [
        *(["env", *settings] if settings else []),
        *engine.horovodrun,
        *_options(plan),
        *(plan.python, "-m", "hvdtrain.worker", str(plan.script), *plan.arguments),
    ]


def launch_environment(plan: LaunchPlan, *, path: str, mpirun: str | None) -> dict[str, str]:
    """What horovodrun's environment needs beyond the user's own.

    Args:
        path: the user's PATH.
        mpirun: the mpirun to use, absolute.
    """
    settings = {}
    if plan.controller == "mpi":
        # A rank that waits for a message polls; where ranks fill the cores, it polls on a core that
        # another one needs (see `hvdtrain.runtime` for the figures).
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
        # horovodrun takes mpirun from PATH, which lacks it when the environment is not activated.
        if mpirun and str(Path(mpirun).parent) not in path.split(os.pathsep):
            settings["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{path}"
    return settings


def _options(plan: LaunchPlan) -> list[str]:
    options = ["-np", str(plan.np), f"--{plan.controller}"]
    if plan.hosts:
        options += ["-H", ",".join(map(str, plan.hosts))]
    if plan.start_timeout is not None:
        options += ["--start-timeout", str(plan.start_timeout)]
    if plan.network_interfaces:
        options += ["--network-interfaces", ",".join(plan.network_interfaces)]
    if plan.ssh_port is not None:
        options += ["--ssh-port", str(plan.ssh_port)]
    if plan.ssh_identity_file is not None:
        options += ["--ssh-identity-file", str(plan.ssh_identity_file)]
    options += ["--stall-check-warning-time-seconds", str(plan.stall_warning_seconds)]
    options += ["--stall-check-shutdown-time-seconds", str(plan.stall_shutdown_seconds)]
    if plan.verbose:
        options += ["--verbose"]
    return options
