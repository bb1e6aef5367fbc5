"""Input and output of a launcher: the site of the launch, and the command that starts its processes.

The printed command is the one that runs, except for its first words: a program of hvdtrain may take the place of the
user's, with the same arguments.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.environment import FORWARD
from hvdtrain.errors import UsageError
from hvdtrain.launch.addresses import LOCAL_NAMES, own_names
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.installed_horovod import find_mpirun
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running.process_names import RANKS, ProcessNames
from hvdtrain.launch.slurm.allocation import Allocation
from hvdtrain.rank_variables import CONTROLLER, CPU_OPERATIONS, size_variable
from hvdtrain.strategy_names import HOROVOD, STRATEGY


@dataclass(frozen=True)
class Site:
    """The environment in which a launch starts.

    Attributes:
        environ: Environment of the launching process.
        folder: Absolute path of the current folder.
        horovodrun: Name or path of this Python's horovodrun.
        mpirun: Path of mpirun, or None.
        mpi_prefix: Installation folder of mpirun if it is Open MPI 4, else empty.
        names: Names of this machine.
        home: Home folder, or a substitute, for when HOME is not set; empty if it is.
        allocation: Nodes of the surrounding Slurm job, if they are to be used.
        image: Container image for the ranks, for a launcher that supports it.
    """

    environ: Mapping[str, str] = field(repr=False)
    folder: str = "."
    horovodrun: str = "horovodrun"
    mpirun: str | None = None
    mpi_prefix: str = ""
    names: frozenset[str] = LOCAL_NAMES
    home: str = ""
    allocation: Allocation | None = None
    image: str | None = None


def this_site(allocation: Allocation | None = None, image: str | None = None) -> Site:
    """Describe the site of this process."""
    own = Path(sys.executable).with_name("horovodrun")
    found = shutil.which("horovodrun")
    elsewhere = own.exists() and not (found and Path(found).samefile(own))
    mpirun = find_mpirun()
    prefix = Path(mpirun).parent.parent if mpirun else None
    return Site(
        environ=dict(os.environ),
        folder=str(Path.cwd()),
        horovodrun=str(own) if elsewhere else "horovodrun",
        mpirun=mpirun,
        mpi_prefix=str(prefix) if prefix and (prefix / "bin" / "orted").exists() else "",
        names=own_names(),
        home="" if "HOME" in os.environ else _home(),
        allocation=allocation,
        image=image,
    )


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:  # A user ID without an entry in /etc/passwd, as in containers.
        return tempfile.gettempdir()


def check_started_once(environ: Mapping[str, str]) -> None:
    """Check that this process was not started by another launcher as one of several. Raises UsageError if it was."""
    name = size_variable(environ)
    if name:
        size = environ[name]
        raise UsageError(
            f"hvdtrain run was started as one of {size} processes of another launch "
            f"({name}={size}): start it once, without mpirun or horovodrun and not from a worker; "
            "it starts the workers itself"
        )


@dataclass(frozen=True)
class LaunchCommand:
    """A launch that is ready to start.

    Attributes:
        words: Command as a user would type it.
        settings: Variables to set for the command, in addition to the environment. None unsets one.
        stand_in: Words to run in place of the first word, with the same arguments. If empty, the first word runs.
        for_stand_in: Variables for `stand_in` alone, which do not change what the command does.
        notes: Notes for a user who pastes the command, one line each.
        process_names: Names of the launch's processes, for messages.
        elastic: Whether the other ranks continue when one fails.
    """

    words: tuple[str, ...]
    settings: Mapping[str, str | None] = field(default_factory=dict)
    stand_in: tuple[str, ...] = ()
    for_stand_in: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    process_names: ProcessNames = RANKS
    elastic: bool = False

    @property
    def argv(self) -> list[str]:
        """The arguments of the process to start."""
        return [*self.stand_in, *self.words[1:]] if self.stand_in else list(self.words)

    @property
    def typed(self) -> list[str]:
        """The command as a user would type it, including the variables."""
        return self.with_settings(self.words)

    def with_settings(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` as a command that also sets the variables."""
        changes = self.settings.items()
        unset = [word for name, value in changes if value is None for word in ("-u", name)]
        values = [f"{name}={value}" for name, value in changes if value is not None]
        return [*(["env", *unset, *values] if changes else []), *argv]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` updated with the variables for the process to start."""
        changed = {**environ, **self.for_stand_in, **self.settings}
        return {name: value for name, value in changed.items() if value is not None}


def rank_settings(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that a launcher sets for every rank; None unsets one.

    A secret keeps its value in `environ` and has none here. Variables exported for other strategies or controllers are
    overridden, so that they do not affect the ranks.
    """
    settings: dict[str, str | None] = {}
    if environ.get(STRATEGY, HOROVOD) != HOROVOD:
        settings[STRATEGY] = HOROVOD
    for name in (CONTROLLER, CPU_OPERATIONS):
        if environ.get(name, plan.controller).lower() != plan.controller:
            settings[name] = None
    return settings | values_of(plan.env)


def forwarding_variable(plan: LaunchPlan) -> dict[str, str]:
    """Return the variable that names, for a program of `hvdtrain.start`, those to forward to all ranks."""
    return {FORWARD: ",".join(one.name for one in plan.env)} if plan.env else {}


def values_of(variables: Sequence[EnvVar]) -> dict[str, str]:
    """Return the values that may appear in a command; secrets have none."""
    return {one.name: one.value for one in variables if one.value is not None}
