"""`hvdtrain run`: a training script on several workers."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.options import PATH, GroupedOption, SectionedCommand, launch_options
from hvdtrain.errors import UsageError
from hvdtrain.launch.command import launch_command
from hvdtrain.launch.engine import choose_controller, find_engine, find_mpirun
from hvdtrain.launch.hosts import read_hostfile
from hvdtrain.launch.passing import looks_secret, masked
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.session import View, run_launch
from hvdtrain.launch.variables import EnvVar


@click.command(cls=SectionedCommand, context_settings={"allow_interspersed_args": False})
@launch_options
@click.option(
    "--hostfile", type=PATH, metavar="FILE", cls=GroupedOption, group="hosts",
    help="File with a line 'NAME slots=N' for each host, instead of --hosts.",
)  # fmt: skip
@click.option(
    "--log-dir", type=PATH, metavar="FOLDER", cls=GroupedOption, group="basic",
    help="Folder for every worker's output.  [default: .hvdtrain/logs/TIME]",
)  # fmt: skip
@click.option(
    "--all-ranks", is_flag=True, cls=GroupedOption, group="basic",
    help="Show the output of all workers, not only rank 0's.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, cls=GroupedOption, group="about",
    help="Print the command, and do not run it.",
)  # fmt: skip
@click.argument("script", type=PATH)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(log_dir: Path | None, all_ranks: bool, dry_run: bool, **values: Any) -> None:
    """Run SCRIPT on several workers, through horovodrun.

    What follows SCRIPT is the script's own. Rank 0's output is shown as if the script ran alone;
    the output of all workers is kept in files. The exit code is that of the worker that failed
    first.
    """
    mpirun = find_mpirun()
    plan = plan_of(values, mpirun)
    argv = launch_command(plan, path=os.environ.get("PATH", ""), mpirun=mpirun)
    if dry_run:
        click.echo(shlex.join(masked(argv)))
        return
    if plan.verbose:
        click.echo(shlex.join(masked(argv)), err=True)
    sys.exit(run_launch(argv, View(log_dir, all_ranks, plan.verbose)))


def plan_of(values: dict[str, Any], mpirun: str | None) -> LaunchPlan:
    """The plan that the options `values` ask for, on this machine. Raises UsageError."""
    values = {name: value for name, value in values.items() if value is not None}
    hostfile = values.pop("hostfile", None)
    if hostfile is not None:
        if "hosts" in values:
            raise UsageError("--hosts and --hostfile both name the hosts: give one of them")
        values["hosts"] = read_hostfile(hostfile)
    wanted = values["controller"]
    if wanted == "auto" and {"host_discovery_script", "min_np", "max_np"} & values.keys():
        wanted = "gloo"
    values["controller"] = choose_controller(wanted, find_engine().built, mpirun)
    values["launcher"] = "horovodrun"
    values["np"] = _number_of_ranks(values)
    values["env"] = tuple(map(_without_secret, values["env"]))
    return LaunchPlan(**values)


def _number_of_ranks(values: dict[str, Any]) -> int:
    if "np" in values:
        return int(values["np"])
    if "hosts" in values:
        return sum(host.slots for host in values["hosts"])
    if "min_np" in values:
        return int(values["min_np"])
    raise UsageError("how many workers? Give -np N, or the hosts with their slots")


def _without_secret(variable: EnvVar) -> EnvVar:
    """A secret's value goes into this process's environment, and stays out of the command."""
    if variable.value is None or not looks_secret(variable.name, variable.value):
        return variable
    os.environ[variable.name] = variable.value
    return replace(variable, value=None)
