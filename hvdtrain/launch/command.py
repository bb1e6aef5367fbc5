"""LaunchPlan -> the whole command that runs it. What is printed is what runs.

The command is `hvdtrain.start.horovodrun`, Horovod's own launcher in a process that knows what
Horovod was built with and which variables may travel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.launch import program
from hvdtrain.launch.horovodrun import horovodrun_options
from hvdtrain.launch.plan import LaunchPlan


def launch_command(plan: LaunchPlan, *, path: str, mpirun: str | None) -> list[str]:
    """`env NAME=VALUE... python -m hvdtrain.start.horovodrun --env NAME... -- OPTIONS COMMAND`.

    Args:
        plan: what to launch. A secret in `plan.env` has no value: it is in the environment.
        path: the user's PATH.
        mpirun: the mpirun to use, absolute.
    """
    settings = {
        **_launcher_settings(plan, path, mpirun),
        **{one.name: one.value for one in plan.env if one.value is not None},
    }
    command = [
        *(sys.executable, "-m", "hvdtrain.start.horovodrun"),
        *(part for one in plan.env for part in ("--env", one.name)),
        "--",
        *horovodrun_options(plan),
        *rank_command(plan),
    ]
    return with_settings(settings, command)


def with_settings(settings: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """`argv` as a command that sets these variables as well."""
    words = [f"{name}={value}" for name, value in settings.items()]
    return ["env", *words, *(argv[1:] if argv[0] == "env" else argv)] if words else list(argv)


def rank_command(plan: LaunchPlan) -> list[str]:
    """What each rank runs."""
    return program.rank_command(plan.program)


def _launcher_settings(plan: LaunchPlan, path: str, mpirun: str | None) -> dict[str, str]:
    """What the launcher's environment needs beyond the user's own."""
    settings = {}
    if plan.controller == "mpi":
        # A rank that waits for a message polls; where ranks fill the cores, it polls on a core that
        # another one needs (see `hvdtrain.runtime` for the figures).
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
        # horovodrun takes mpirun from PATH, which lacks it when the environment is not activated.
        if mpirun and str(Path(mpirun).parent) not in path.split(os.pathsep):
            settings["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{path}"
    return settings
