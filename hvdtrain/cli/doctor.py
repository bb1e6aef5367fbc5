"""`hvdtrain doctor`: can this machine, and can these hosts, train?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import click

from hvdtrain import __version__
from hvdtrain.doctor import horovod, machine, services, software
from hvdtrain.doctor import hosts as other_hosts
from hvdtrain.doctor.checks import Options, Result, run_checks, skip
from hvdtrain.doctor.report import Wait, as_json, count, lines_of, summary
from hvdtrain.environment import EXIT_FAILURE
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import parse_hosts, read_hostfile
from hvdtrain.launch.running.bounded import ending_commands

_DAY_SECONDS = 86400.0
PARTS = (software, machine, services, horovod, other_hosts)
"""What is checked, in the order in which it is shown."""


@click.command()
@click.option(
    "-H",
    "--hosts",
    metavar="NAME[:SLOTS],...",
    help="Look at these hosts too, and let them reduce.",
)
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    help="The same from a file: 'NAME slots=N' a line.",
)
@click.option(
    "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the hosts' ssh."
)
@click.option(
    "--ssh-identity-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Key to reach the hosts with.",
)
@click.option(
    "--network-interfaces",
    metavar="NAME,...",
    help="Each host has one of these interfaces, and connects over it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Time for one check; more is a failure.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object.")
def doctor(
    hosts: str | None,
    hostfile: Path | None,
    ssh_port: int | None,
    ssh_identity_file: Path | None,
    network_interfaces: str | None,
    timeout: float,
    wants_json: bool,
) -> None:
    """Can this machine train? Check it, and say the fix for each thing that is wrong.

    Software versions, shared memory, folders, limits, threads, Slurm, containers, GPUs, and a real allreduce over Gloo
    and MPI. With --hosts, for each of them: name, ssh, versions, network, clock, and then an allreduce over all.

    ok: works; warn: works, but not well; FAIL: does not work; skip: not needed, or not here. The exit code is 1 if
    anything failed, else 0.

    --json prints {schema, ok, failures, warnings, seconds, hvdtrain, findings: [{group, name, status, seen, fix}]}.
    """
    options = Options(
        environ=os.environ,
        limit=min(_DAY_SECONDS, timeout),  # In this order: of nan, too.
        hosts=_names(hosts, hostfile),
        interfaces=tuple(network_interfaces.split(",")) if network_interfaces else (),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
    )
    start = time.monotonic()
    # Python has no standard output where the shell has closed it.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    wait = Wait(moves=is_terminal and not wants_json)
    found: list[tuple[str, Result]] = []
    # Closed, whatever comes: then no check starts any more, and those that run can be ended.
    with ending_commands(), closing(_results(options, wait.draw)) as results_by_group:
        for group, result in results_by_group:
            wait.clear()
            if not wants_json:
                if not found or found[-1][0] != group:
                    click.secho(group, bold=True)
                for line in lines_of(result):
                    click.echo(line)
            found.append((group, result))
    seconds = time.monotonic() - start
    results = [result for _, result in found]
    if wants_json:
        click.echo(as_json(found, {"hvdtrain": __version__}, seconds))
    else:
        click.echo(summary(results, seconds))
    sys.exit(EXIT_FAILURE if count(results, "fail") else 0)


def _results(
    options: Options, waiting: Callable[[Sequence[str], float], None]
) -> Generator[tuple[str, Result], None, None]:
    """Group and result, as they become known; the allreduce over the hosts only if each of them is well."""
    sick = False
    checks = [check for part in PARTS for check in part.checks(options)]
    for check, results in run_checks(checks, waiting):
        for result in results:
            sick |= result.status == "fail" and check.group.startswith("Host ")
            yield check.group, result
    if not options.hosts:
        return
    if sick:
        yield horovod.JOINT, skip("allreduce", "not before each host is well")
        return
    for check, results in run_checks(horovod.joint_checks(options), waiting):
        yield from ((check.group, result) for result in results)


def _names(hosts: str | None, hostfile: Path | None) -> tuple[str, ...]:
    """The hosts' names; slots may be left out here."""
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts: give one of them")
    if hostfile is not None:
        return tuple(host.name for host in read_hostfile(hostfile))
    if hosts is None:
        return ()
    items = [item.strip() for item in hosts.split(",")]
    with_slots = ",".join(item if ":" in item else f"{item}:1" for item in items)
    return tuple(host.name for host in parse_hosts(with_slots))
