"""The horovodrun launcher, for this machine and hosts reached over ssh: express a plan as horovodrun's options.

Horovod's own launcher runs inside `hvdtrain.start.run_horovod`, which takes horovodrun's arguments, knows what Horovod
was built with and which variables to forward, and starts the ranks about five seconds sooner. Horovod inserts some
values unquoted into shell command lines: they are quoted here so that the shell restores them, and `plan_validation`
rejects those that cannot be quoted.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from hvdtrain.environment import HASH_SEED
from hvdtrain.launch.launch_command import LaunchCommand, Site, forwarding_variable, rank_settings
from hvdtrain.launch.option_types import Option, options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import mpi_words
from hvdtrain.launch.rank_program import rank_command
from hvdtrain.launch.running.time_limits import START_SECONDS

STAND_IN = (sys.executable, "-P", "-m", "hvdtrain.start.run_horovod")
"""argv of what takes the place of horovodrun."""
_WAITS = (
    "when pasted, horovodrun waits for a second host unless given --network-interfaces; "
    "hvdtrain run does not"
)
_SHOWS = (
    "when pasted, horovodrun --gloo puts all variables of your shell into command lines that "
    "every user of the hosts can read; hvdtrain run does not"
)

_SECONDS_FOR_A_FURTHER_HOST = 2
COOLDOWN = (10, 300)
"""Blacklist cooldown in seconds. Horovod's default is never to reuse a host that failed."""


def prepare(plan: LaunchPlan, site: Site) -> LaunchCommand:
    """Prepare the command `horovodrun OPTIONS python -m hvdtrain.worker SCRIPT...`."""
    elsewhere = plan.elastic or any(host.name not in site.names for host in plan.hosts)
    if elsewhere and plan.controller == "mpi":
        plan = _with_prefix(plan, site.mpi_prefix)
    notes = []
    if plan.elastic and not plan.network_interfaces:
        notes.append(_WAITS)
    if elsewhere and plan.controller == "gloo":
        notes.append(_SHOWS)
    return LaunchCommand(
        words=(site.horovodrun, *horovodrun_options(plan), *rank_command(plan.program)),
        settings=_of_mpi(plan, site) | rank_settings(plan, site.environ),
        stand_in=STAND_IN,
        # Ranks set the hash seed themselves if it is not set, at the cost of starting Python twice.
        for_stand_in={HASH_SEED: site.environ.get(HASH_SEED, "0"), **forwarding_variable(plan)},
        notes=tuple(notes),
        elastic=plan.elastic,
    )


def _with_prefix(plan: LaunchPlan, prefix: str) -> LaunchPlan:
    """Add --prefix: ssh starts with a minimal PATH, in which Open MPI's programs are not found on other hosts."""
    given = plan.mpi_args or ""
    if not prefix or "--prefix" in given:
        return plan
    return replace(plan, mpi_args=f"{given} --prefix {shlex.quote(prefix)}".strip())


def _of_mpi(plan: LaunchPlan, site: Site) -> dict[str, str | None]:
    """Return the variables that mpirun needs in its environment."""
    if plan.controller != "mpi":
        return {}
    # A rank waiting for a message polls; when ranks fill all cores, it takes a core that another rank needs
    # (see `hvdtrain.runtime` for measurements).
    settings: dict[str, str | None] = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    path = site.environ.get("PATH", "")
    # horovodrun looks for mpirun in PATH, which lacks it if the environment is not activated.
    if site.mpirun and str(Path(site.mpirun).parent) not in path.split(os.pathsep):
        settings["PATH"] = f"{Path(site.mpirun).parent}{os.pathsep}{path}"
    if site.home:  # Open MPI crashes without HOME.
        settings["HOME"] = site.home
    return settings


def horovodrun_options(plan: LaunchPlan) -> list[str]:
    """Return the options of horovodrun 0.28.1 that express `plan`, without the command."""
    return [word for option in options_of(plan) for word in _words(plan, option)]


def start_timeout(wanted: int | None, hosts: int) -> int | None:
    """Return the seconds within which the hosts must answer. None leaves it to Horovod (30 s).

    Horovod contacts all hosts from one process, with one thread per host. With many hosts, each one
    (fork, ssh, pickle) takes one to two seconds of that process's time.
    """
    if wanted is not None or hosts < 2:
        return wanted
    return START_SECONDS + _SECONDS_FOR_A_FURTHER_HOST * (hosts - 1)


def _words(plan: LaunchPlan, option: Option) -> list[str]:
    """Return the words for one option. Special cases come first; the rest are a flag and its value."""
    flag, value = option.flag, getattr(plan, option.field)
    match option.field:
        case "controller":
            return [f"--{plan.controller}"]
        case "start_timeout":
            value = start_timeout(plan.start_timeout, len(plan.hosts))
        case "min_np" if plan.elastic:
            value = plan.min_np or plan.np  # horovodrun does not treat --max-np alone as elastic.
        case "slots_per_host" if plan.host_discovery_script:
            value = plan.slots_per_host or 1  # horovodrun fails for a host without slots.
        case "blacklist_cooldown_range" if plan.elastic:
            value = plan.blacklist_cooldown_range or COOLDOWN
        case "stall_warning_seconds" | "stall_shutdown_seconds" if not plan.stall_check:
            return []
        case "host_discovery_script" if value is not None:
            # Run by a shell, which would search PATH for a bare name.
            value = shlex.quote(str(value.absolute()))
        case "output_filename" if value is not None and plan.controller == "mpi":
            value = shlex.quote(str(value))
        case "mpi_args" | "binding_args" if value is not None:
            # horovodrun's parser accepts a value that begins with '-' only after '='.
            return [f"{flag}={shlex.join(mpi_words(flag, value))}"]
    if not flag and not option.off:
        return []
    return _plain_words(option, value)


def _plain_words(option: Option, value: object) -> list[str]:
    flag, off = option.flag, option.off
    match value:
        case None | ():
            return []
        case True:
            return [flag] if flag else []
        case False:
            return [off] if off else []
        case (int(), int()):
            return [flag, *map(str, value)]
        case tuple():
            value = ",".join(map(str, value))
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
