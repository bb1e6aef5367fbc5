"""Build a LaunchPlan from the options of `hvdtrain run`, choosing whatever the user left open."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hvdtrain.environment import HANG_SECONDS, STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.errors import UsageError
from hvdtrain.launch.devices import usable_cores, visible_gpus
from hvdtrain.launch.hosts import hosts_of
from hvdtrain.launch.installed_horovod import choose_controller, installed_controllers
from hvdtrain.launch.launch_command import Site
from hvdtrain.launch.launchers.srun import choose_launcher, choose_srun_controller, used_hosts
from hvdtrain.launch.option_types import options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import ELASTIC, is_given, unmet_need
from hvdtrain.launch.rank_program import PROGRAM_OPTIONS, program_given
from hvdtrain.launch.secrets import variable_to_pass
from hvdtrain.launch.slurm.allocation import Allocation

STALL_TIMES = ("stall_warning_seconds", "stall_shutdown_seconds")
"""Options that have no value if the user gave none, even though they have a default."""
_STALL_SECONDS = STALL_WARNING_SECONDS, STALL_SHUTDOWN_SECONDS
_ADOPTED_STALL_SECONDS = 600, HANG_SECONDS
"""Stall check's times for an adopted script.

Its ranks compute on their own between the fits that they share, for hours perhaps, and not equally fast.
"""
_MOST_WORKERS_OF_CORES = 8
"""Maximum number of workers chosen for a machine without GPUs."""


def plan_of(
    values: Mapping[str, Any], site: Site, say: Callable[[str], None], behind: Container[str] = ()
) -> LaunchPlan:
    """Build the plan for the options of `hvdtrain run` on this machine.

    Args:
        values: Values of the options; None if not given.
        site: Site of the launch.
        say: Function called with each message about a chosen or ignored option.
        behind: Options to drop where they have no effect, instead of raising an error.

    Raises:
        UsageError: The options are invalid or cannot be combined.
        EngineError: Horovod is not installed, or supports no controller here.
    """
    values = {name: value for name, value in values.items() if value is not None}
    hosts = hosts_of(values.pop("hosts", None), values.pop("hostfile", None))
    if hosts:
        values["hosts"] = hosts
    elastic = any(name in values for name in ELASTIC)
    _choose_place(values, elastic, site.allocation, say)
    _choose_stall_times(values, say)
    built, wanted, mpirun = installed_controllers(), values["controller"], site.mpirun
    if elastic and wanted == "auto":
        wanted = "gloo"
    if values["launcher"] == "srun":
        # srun replaces mpirun.
        mpirun, wanted = "srun", choose_srun_controller(wanted, built)
    values["controller"] = choose_controller(wanted, built, mpirun)
    _leave_out(values, behind, say)
    values["env"] = tuple(map(variable_to_pass, values.get("env", ())))
    plan = {name: value for name, value in values.items() if name not in PROGRAM_OPTIONS}
    return LaunchPlan(program=program_given(values), **plan)


def _choose_place(
    values: dict[str, Any], elastic: bool, allocation: Allocation | None, say: Callable[[str], None]
) -> None:
    """Set the number of ranks, their hosts and the launcher, where the user did not."""
    wanted = values["launcher"]
    if elastic:
        if wanted == "srun":
            raise UsageError(
                "--launcher srun starts a fixed number of workers: leave it out for elastic training, or leave out "
                "--min-np, --max-np and --host-discovery-script"
            )
        allocation = None
    own_hosts = "hosts" in values
    if allocation is not None and not own_hosts:
        here = len(allocation.hosts) == 1 and allocation.this_node is not None
        slots = max(values.get("np", 0), allocation.hosts[0].slots)
        alone = (replace(allocation.hosts[0], slots=slots),)
        # A single node accepts more ranks than the job requested; on several, their placement would be unclear.
        values["hosts"] = alone if here else allocation.hosts
        values.setdefault("np", sum(host.slots for host in allocation.hosts))
    values["np"] = _number_of_ranks(values, say)
    hosts = used_hosts(values.get("hosts", ()), values["np"])
    values["launcher"] = choose_launcher(wanted, allocation, hosts)
    local = allocation is not None and {host.name for host in hosts} == {allocation.this_node}
    if values["launcher"] == "horovodrun" and local and not own_hosts:
        del values["hosts"]  # This machine, whose name need not resolve here.


def _choose_stall_times(values: dict[str, Any], say: Callable[[str], None]) -> None:
    """Set the stall check's times where the user did not, and make the shutdown time longer than the warning time.

    A time set by the user is kept. If both are set, the shutdown time is, so that no job waits longer.
    """
    given = [name for name in STALL_TIMES if name in values]
    usual = _ADOPTED_STALL_SECONDS if values.get("adopt") and not given else _STALL_SECONDS
    warning, shutdown = times = [values.get(*one) for one in zip(STALL_TIMES, usual, strict=True)]
    if values["stall_check"] and 0 < shutdown <= warning:
        if "stall_shutdown_seconds" in given:
            times = [max(shutdown, 2) // 2, max(shutdown, 2)]
        else:
            times = [warning, warning + STALL_SHUTDOWN_SECONDS - STALL_WARNING_SECONDS]
        say(
            f"--stall-shutdown-seconds {shutdown} is not longer than --stall-warning-seconds {warning}: "
            f"using {times[1]} and {times[0]}"
        )
    values.update(zip(STALL_TIMES, times, strict=True))


def _number_of_ranks(values: Mapping[str, Any], say: Callable[[str], None]) -> int:
    if "np" in values:
        return int(values["np"])
    if "hosts" in values:
        return sum(host.slots for host in values["hosts"])
    if "min_np" in values:
        return int(values["min_np"])
    if "host_discovery_script" in values:
        raise UsageError(
            "--host-discovery-script needs the number of workers to start with: add -np N"
        )
    number, reason = workers_here(len(visible_gpus(os.environ)), usable_cores)
    say(f"-np {number}: {reason}")
    if "-np" in values.get("arguments", ()):
        say("the script is passed -np: options of hvdtrain come before the script")
    return number


def workers_here(gpus: int, cores: Callable[[], int]) -> tuple[int, str]:
    """Return the number of workers for this machine, and the reason.

    One worker per core was faster than one worker with several cores, except for networks with very wide layers. With
    many cores, it would mean many copies of the model and of TensorFlow, and small shares of the batch.

    Args:
        gpus: Number of GPUs.
        cores: Function that returns the number of cores; called only without GPUs.
    """
    if gpus:
        return gpus, f"one worker per GPU on this machine ({gpus})"
    found = cores()
    number = min(found, _MOST_WORKERS_OF_CORES)
    if number == found:
        return number, f"no GPU found; one worker per core ({found})"
    return number, f"no GPU found; the {found} cores are shared by {number} workers"


def _leave_out(values: dict[str, Any], behind: Container[str], say: Callable[[str], None]) -> None:
    """Drop options from a file or a variable (`behind`) that would have no effect in this plan."""
    options = options_of(LaunchPlan)
    plan: Any = SimpleNamespace(**{one.field: one.default for one in options} | values)
    plan.elastic = any(values.get(name) for name in ELASTIC)
    for option in options:
        overlooked = option.field in behind and is_given(values.get(option.field))
        if overlooked and (remedy := unmet_need(option, plan)):
            say(f"{option.name} has no effect here and is ignored: {remedy}")
            del values[option.field]
