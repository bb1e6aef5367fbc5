"""`hvdtrain run`: a training script on several workers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from hvdtrain.environment import STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.errors import UsageError
from hvdtrain.launch.command import launch_command
from hvdtrain.launch.engine import choose_controller, find_engine, find_mpirun
from hvdtrain.launch.hosts import Host, parse_hosts, read_hostfile
from hvdtrain.launch.passing import masked
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.session import View, run_launch


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "--num-proc", "np", type=int, metavar="N", help="Number of workers.")
@click.option(
    "-H", "--hosts", metavar="NAME:SLOTS,...", help="Hosts and how many workers each takes."
)
@click.option(
    "--hostfile", type=click.Path(path_type=Path), help="File with a line 'NAME slots=N' a host."
)
@click.option(
    "--controller",
    type=click.Choice(["auto", "mpi", "gloo"]),
    default="auto",
    show_default=True,
    help="What the workers coordinate through; auto: MPI if Horovod was built with it.",
)
@click.option("--start-timeout", type=int, metavar="SECONDS", help="Time for the hosts to answer.")
@click.option(
    "--network-interfaces", metavar="NAME,...", help="Interfaces to communicate over, such as eth0."
)
@click.option("--ssh-port", type=int, metavar="PORT", help="Port of the other hosts' ssh.")
@click.option(
    "--ssh-identity-file",
    type=click.Path(path_type=Path),
    help="Key to reach the other hosts with.",
)
@click.option(
    "--stall-warning-seconds",
    type=int,
    default=STALL_WARNING_SECONDS,
    envvar="HOROVOD_STALL_CHECK_TIME_SECONDS",
    show_default=True,
    help="Warn when some workers wait this long for the others.",
)
@click.option(
    "--stall-shutdown-seconds",
    type=int,
    default=STALL_SHUTDOWN_SECONDS,
    envvar="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    show_default=True,
    help="End the job after this; 0 is never.",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="Folder for every worker's output.  [default: .hvdtrain/logs/TIME]",
)
@click.option(
    "--all-ranks", is_flag=True, help="Show the output of all workers, not only rank 0's."
)
@click.option("--verbose", is_flag=True, help="Show the command and what horovodrun says.")
@click.option("--dry-run", is_flag=True, help="Print the command, and do not run it.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    np: int | None,
    hosts: str | None,
    hostfile: Path | None,
    controller: str,
    start_timeout: int | None,
    network_interfaces: str | None,
    ssh_port: int | None,
    ssh_identity_file: Path | None,
    stall_warning_seconds: int,
    stall_shutdown_seconds: int,
    log_dir: Path | None,
    all_ranks: bool,
    verbose: bool,
    dry_run: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT on several workers, through horovodrun.

    What follows SCRIPT is the script's own. Rank 0's output is shown as if the script ran alone;
    the output of all workers is kept in files. The exit code is that of the worker that failed
    first.
    """
    named = _named_hosts(hosts, hostfile)
    engine = find_engine()
    mpirun = find_mpirun()
    plan = LaunchPlan(
        script=script,
        arguments=arguments,
        np=_number_of_ranks(np, named),
        controller=choose_controller(controller, engine.built, mpirun),
        hosts=named,
        start_timeout=start_timeout,
        network_interfaces=tuple(network_interfaces.split(",")) if network_interfaces else (),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        stall_warning_seconds=stall_warning_seconds,
        stall_shutdown_seconds=stall_shutdown_seconds,
        verbose=verbose,
    )
    argv = launch_command(plan, path=os.environ.get("PATH", ""), mpirun=mpirun)
    if dry_run:
        click.echo(shlex.join(masked(argv)))
        return
    if verbose:
        click.echo(shlex.join(masked(argv)), err=True)
    sys.exit(run_launch(argv, View(log_dir, all_ranks, verbose)))


def _named_hosts(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts: give one of them")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return parse_hosts(hosts) if hosts is not None else ()


def _number_of_ranks(np: int | None, hosts: tuple[Host, ...]) -> int:
    if np is not None:
        return np
    if hosts:
        return sum(host.slots for host in hosts)
    raise UsageError("how many workers? Give -np N, or the hosts with their slots")
