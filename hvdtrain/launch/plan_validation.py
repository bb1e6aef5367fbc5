"""Validate a launch plan. horovodrun checks most of this late, or never.

Horovod inserts several options unquoted into command lines for `/bin/sh -c` and `ssh`
(horovod/runner/mpi_run.py, gloo_run.py, util/remote.py). The `horovodrun` launcher quotes them where
Horovod allows that; for the rest, only harmless characters are accepted here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.launch.addresses import own_names
from hvdtrain.launch.hosts import MOST_SLOTS
from hvdtrain.launch.option_types import Option, options_of
from hvdtrain.launch.secrets import looks_secret
from hvdtrain.launch.user_files import check_script
from hvdtrain.strategy_names import PARAMETER_SERVER

if TYPE_CHECKING:
    from hvdtrain.launch.env_forwarding import EnvVar
    from hvdtrain.launch.plan import LaunchPlan
    from hvdtrain.launch.rank_program import Program

_INTERFACE = re.compile(r"\w[\w.:@-]*", re.ASCII)
# A path that a shell, and mpirun, which splits at spaces, both read as one word.
_PLAIN_PATH = re.compile(r"[\w./@%+=:,-]+")
# Characters with a meaning for the shell; no option of mpirun needs any of them.
_SHELL_SYNTAX = frozenset(";&|<>$`()\\\n")


class Condition(NamedTuple):
    """A test of whether a plan meets a need, and the remedy if it does not."""

    met: Callable[[LaunchPlan], bool]
    remedy: str


ELASTIC = ("host_discovery_script", "min_np", "max_np")
CONDITIONS = {
    "gloo": Condition(lambda plan: plan.controller == "gloo", "add --controller gloo"),
    "mpi": Condition(lambda plan: plan.controller == "mpi", "add --controller mpi"),
    "elastic": Condition(
        lambda plan: plan.elastic,
        "add --host-discovery-script, --min-np or --max-np, which make the training elastic",
    ),
    "discovery": Condition(
        lambda plan: plan.host_discovery_script is not None,
        "add --host-discovery-script; -H and hostfiles contain the slots",
    ),
    "autotune": Condition(lambda plan: plan.autotune is True, "add --autotune"),
    "timeline": Condition(
        lambda plan: plan.timeline_filename is not None, "add --timeline-filename FILE"
    ),
    "several hosts": Condition(
        lambda plan: len(plan.hosts) > 1 or plan.host_discovery_script is not None,
        "name several hosts with -H, or leave it out",
    ),
    "one worker per host": Condition(
        lambda plan: most_local_ranks(plan) == 1,
        "with several workers per host, give each one its own core: --env HOROVOD_THREAD_AFFINITY=0,1,... "
        "(the first for local rank 0)",
    ),
    "horovodrun": Condition(
        lambda plan: plan.launcher == "horovodrun",
        "another launcher starts the workers; leave it out, or add --launcher horovodrun",
    ),
}
# Mutually exclusive options. (A hostfile is read before the plan exists.)
MUTUALLY_EXCLUSIVE = {
    ("hosts", "hostfile", "host_discovery_script"): "both name the hosts",
    ("hierarchical_allreduce", "torus_allreduce"): "do the same thing",
}


def check(plan: LaunchPlan) -> None:
    """Check that all options of `plan` are valid. Raises UsageError for the first that is not."""
    check_given(plan.program, options_of(plan), vars(plan))
    for option in options_of(plan):
        if is_given(getattr(plan, option.field)) and (remedy := unmet_need(option, plan)):
            raise UsageError(f"{option.name} has no effect here: {remedy}")
    _check_numbers_of_workers(plan)
    _check_times(plan)
    _check_exclusions(plan)
    check_variables(plan.env)
    _check_files(plan)
    _check_what_reaches_a_shell(plan)


def is_given(value: Any) -> bool:
    """Return whether an option is given and not switched off."""
    return value is not None and value is not False and value != ()


def unmet_need(option: Option, plan: LaunchPlan) -> str:
    """Return the remedy for the option's first unmet need. Empty if the plan meets all."""
    conditions = (CONDITIONS[need] for need in option.needs)
    return next((one.remedy for one in conditions if not one.met(plan)), "")


def most_local_ranks(plan: LaunchPlan) -> int:
    """Return the largest number of ranks on any one host."""
    left, most = plan.np, 0
    for slots in [host.slots for host in plan.hosts] or [plan.np]:
        most = max(most, min(slots, left))
        left -= min(slots, left)
    return most


def mpi_words(option: str, text: str) -> list[str]:
    """Split the value of `--mpi-args` or `--binding-args` into words. Raises UsageError for shell syntax."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {str(error).lower()}") from None
    found = sorted(_SHELL_SYNTAX.intersection(text))
    if found:
        raise UsageError(
            f"{option} {text!r}: the shell would interpret {' '.join(map(repr, found))}; "
            "pass only options of mpirun, with their values written out"
        )
    return words


def check_given(program: Program, options: Iterable[Option], values: Mapping[str, Any]) -> None:
    """Check the script, and the values of numbers. Raises UsageError for the first that is not valid."""
    if program.is_script:
        check_script(program.name)
    for option in options:
        _check_bounds(option, values.get(option.field))


def _check_bounds(option: Option, value: Any) -> None:
    """Check that a number is within the option's bounds. Raises UsageError if not."""
    unit = f" {option.metavar.lower()}" if option.metavar in {"SECONDS", "MILLISECONDS"} else ""
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        # Horovod reads it as a C++ long. False also for nan.
        if not abs(number) <= sys.maxsize:
            raise UsageError(
                f"{option.name} {number}: must be a finite number, at most {sys.maxsize}"
            )
        _check_range(option.name, number, option.least, option.most, unit)


def _check_range(
    name: str, number: float, least: float | None, most: float | None, unit: str = ""
) -> None:
    if least is not None and number < least:
        unit = unit.removesuffix("s") if least == 1 else unit
        raise UsageError(f"{name} {number}: must be at least {least}{unit}")
    if most is not None and number > most:
        raise UsageError(f"{name} {number}: must be a number from {least} to {most}")


def check_servers(strategy: str, workers: int | None, servers: int | None) -> None:
    """Check --workers and --ps. Raises UsageError if they are out of range, or belong to another strategy."""
    for option, number in (("--workers", workers), ("--ps", servers)):
        if number is not None and strategy != PARAMETER_SERVER:
            raise UsageError(
                f"{option} is for --strategy {PARAMETER_SERVER}; for Horovod's workers use -np N"
            )
        if number is not None:
            _check_range(option, number, 1, MOST_SLOTS)


def check_image(image: str) -> None:
    """Check that the engine would not parse the image name as an option. Raises UsageError if it would."""
    if not image or image.startswith("-"):
        raise UsageError(f"{image!r} is not an image: expected a name, such as hvdtrain:cpu")


def _check_numbers_of_workers(plan: LaunchPlan) -> None:
    least = plan.min_np or plan.np
    if least > plan.np:
        raise UsageError(f"--min-np {least} is more than -np {plan.np}: lower it, or raise -np")
    if plan.max_np is not None and plan.max_np < plan.np:
        raise UsageError(f"--max-np {plan.max_np} is less than -np {plan.np}: raise it")
    if plan.hosts:
        slots = sum(host.slots for host in plan.hosts)
        names = ", ".join(map(str, plan.hosts))
        for option, number in (("-np", plan.np), ("--max-np", plan.max_np or 0)):
            if number > slots:
                raise UsageError(
                    f"{option} {number} is more than the {slots} slots of {names}: "
                    f"lower {option}, or give the hosts more slots"
                )


def _check_times(plan: LaunchPlan) -> None:
    if plan.stall_check and 0 < plan.stall_shutdown_seconds <= plan.stall_warning_seconds:
        raise UsageError(
            f"--stall-shutdown-seconds {plan.stall_shutdown_seconds} must be longer than "
            f"--stall-warning-seconds {plan.stall_warning_seconds}, or 0 for never"
        )
    if plan.blacklist_cooldown_range is not None:
        shortest, longest = plan.blacklist_cooldown_range
        if shortest > longest:
            raise UsageError(
                f"--blacklist-cooldown-range {shortest} {longest}: the shorter time comes first"
            )


def _check_exclusions(plan: LaunchPlan) -> None:
    if plan.elastic and plan.controller != "gloo":
        raise UsageError(
            "elastic training (--host-discovery-script, --min-np, --max-np) works over Gloo only: "
            "use --controller gloo"
        )
    names = {option.field: option.name for option in options_of(plan)}
    for rivals, why in MUTUALLY_EXCLUSIVE.items():
        given = [field for field in rivals if is_given(getattr(plan, field, None))]
        if len(given) > 1:
            named = " and ".join(names[field] for field in given)
            raise UsageError(f"{named} {why}: use only one of them")


def check_variables(variables: Sequence[EnvVar]) -> None:
    """Check that no variable is given twice. Raises UsageError if one is."""
    names = [variable.name for variable in variables]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--env {name} appears twice: keep only one")


def check_key(key: Path | None) -> None:
    """Check that the ssh key, if one is given, is a file. Raises UsageError if not."""
    if key is not None and not key.is_file():
        raise UsageError(f"--ssh-identity-file: no such file: {key}")


def _check_files(plan: LaunchPlan) -> None:
    check_key(plan.ssh_identity_file)
    discovery = plan.host_discovery_script
    if discovery is not None and not discovery.is_file():
        raise UsageError(f"--host-discovery-script: no such file: {discovery}")
    if discovery is not None and not os.access(discovery, os.X_OK):
        raise UsageError(
            f"--host-discovery-script: {discovery} cannot be executed: chmod +x {discovery}"
        )
    # On other hosts, the ranks' folders may be others.
    if not _reaches_other_hosts(plan):
        _check_outputs(plan)


def _check_outputs(plan: LaunchPlan) -> None:
    """Check the output files: Horovod does not report those it cannot write, and mpirun crashes."""
    for option, file in (
        ("--timeline-filename", plan.timeline_filename),
        ("--autotune-log-file", plan.autotune_log_file),
    ):
        if file is not None and file.is_dir():
            raise UsageError(f"{option}: {file} is a folder: pass a file")
        if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option}: cannot write to the folder {file.parent}")
    folder = plan.output_filename
    if folder is not None:
        if folder.is_file():
            raise UsageError(f"--output-filename: {folder} is a file: pass a folder")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(f"--output-filename: cannot write to the folder {there}")


def _check_what_reaches_a_shell(plan: LaunchPlan) -> None:
    for option, text in (("--mpi-args", plan.mpi_args), ("--binding-args", plan.binding_args)):
        words = mpi_words(option, text) if text is not None else ()
        for name, _, value in (word.partition("=") for word in words):
            if value and looks_secret(name, value):
                raise UsageError(
                    f"{option}: anyone on the hosts could read the value of {name} in mpirun's command line: "
                    f"use --env {name} instead, with the value in your environment"
                )
    for name in plan.network_interfaces:
        if not _INTERFACE.fullmatch(name):
            raise UsageError(
                f"--network-interfaces: {name!r} is not the name of an interface: separate names "
                "with commas, such as eth0,ib0"
            )
    key = plan.ssh_identity_file
    if key is not None and not (_PLAIN_PATH.fullmatch(str(key)) and str(key)[0] != "-"):
        raise UsageError(
            f"--ssh-identity-file {str(key)!r}: mpirun and horovodrun accept only letters, digits "
            "and ./_-@%+=:, in this path: move the key, or name it in ~/.ssh/config"
        )
    by_ssh = plan.launcher == "horovodrun" and _reaches_other_hosts(plan)
    if plan.controller == "gloo" and by_ssh:
        folder = str(Path.cwd())
        if not _PLAIN_PATH.fullmatch(folder):
            raise UsageError(
                f"the working folder is {folder!r}: over Gloo, horovodrun accepts only letters, "
                "digits and ./_-@%+=:, in its path on other hosts: work in another folder, or "
                "use --controller mpi"
            )


def _reaches_other_hosts(plan: LaunchPlan) -> bool:
    names = {host.name for host in plan.hosts}
    return plan.host_discovery_script is not None or not names <= own_names()
