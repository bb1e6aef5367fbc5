"""`hvdtrain doctor`: check whether this machine, and other hosts, can train."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import click

from hvdtrain import __version__
from hvdtrain.cli.launch_options import PATH
from hvdtrain.doctor import horovod_checks, machine, services, software
from hvdtrain.doctor import remote_hosts as other_hosts
from hvdtrain.doctor.checks import (
    Check,
    Options,
    Result,
    as_json,
    count,
    lines_of,
    run_checks,
    skip,
    summary,
)
from hvdtrain.environment import EXIT_FAILURE
from hvdtrain.launch.hosts import hosts_of, parse_hosts
from hvdtrain.launch.running.timed_command import ending_commands

_DAY_SECONDS = 86400.0
PARTS = (software, machine, services, horovod_checks, other_hosts)
"""Modules with checks, in the order of their output."""


@click.command()
@click.option(
    "-H", "--hosts", metavar="NAME[:SLOTS],...",
    help="Also check these hosts, with an allreduce across all of them.",
)  # fmt: skip
@click.option(
    "--hostfile", type=PATH, metavar="FILE", help="File with one host per line, as 'NAME slots=N'."
)
@click.option(
    "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of ssh on the hosts."
)
@click.option(
    "--ssh-identity-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Private key for the hosts.",
)  # fmt: skip
@click.option(
    "--network-interfaces", metavar="NAME,...",
    help="Network interfaces; each host must have one of them, and be reachable over it.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(1), default=60, show_default=True, metavar="SECONDS",
    help="Time limit of each check.",
)  # fmt: skip
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
    """Check whether this machine can train, and suggest a fix for each problem.

    Checks software versions, shared memory, folders, limits, threads, Slurm, containers and GPUs, and runs an
    allreduce over Gloo and over MPI. With --hosts, also checks each host's name, ssh, versions, network and clock,
    and an allreduce across all of them.

    ok: works; warn: works, but not well; FAIL: does not work; skip: not needed, or not available here.
    The exit code is 1 if anything failed, else 0.

    --json prints {schema, ok, failures, warnings, seconds, hvdtrain, findings: [{group, name, status, seen, fix}]}.
    """
    options = Options(
        environ=os.environ,
        limit=min(_DAY_SECONDS, timeout),  # In this order, which also handles nan.
        hosts=_names(hosts, hostfile),
        interfaces=tuple(network_interfaces.split(",")) if network_interfaces else (),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
    )
    start = time.monotonic()
    found: list[tuple[str, Result]] = []
    # Always closed, so that no more checks start and running ones can be ended.
    group = ""
    with ending_commands(), closing(_started(options)) as started:
        for check, results in started:
            if check.group != group and not wants_json:
                # Printed before its results are known, to show what is awaited.
                click.secho(check.group, bold=True)
            group = check.group
            for result in results.result():
                found.append((group, result))
                if not wants_json:
                    click.echo("\n".join(lines_of(result)))
    seconds = time.monotonic() - start
    all_results = [result for _, result in found]
    if wants_json:
        click.echo(as_json(found, {"hvdtrain": __version__}, seconds))
    else:
        click.echo(summary(all_results, seconds))
    sys.exit(EXIT_FAILURE if count(all_results, "fail") else 0)


def _started(options: Options) -> Generator[tuple[Check, Future[Sequence[Result]]], None, None]:
    """Yield each check with the future of its results. The allreduce over the hosts runs only if all hosts pass."""
    well = True
    for check, results in run_checks([check for part in PARTS for check in part.checks(options)]):
        yield check, results
        if check.group.startswith("Host ") and count(results.result(), "fail"):
            well = False
    if not options.hosts:
        return
    unwell = [skip("allreduce", "skipped until every host passes")]
    not_now = Check(horovod_checks.JOINT, "allreduce", lambda: unwell, options.quick)
    yield from run_checks(horovod_checks.joint_checks(options) if well else [not_now])


def _names(hosts: str | None, hostfile: Path | None) -> tuple[str, ...]:
    """Return the names of the hosts, given with or without slots."""
    items = [item.strip() for item in hosts.split(",")] if hosts is not None else []
    with_slots = ",".join(item if ":" in item else f"{item}:1" for item in items)
    found = hosts_of(parse_hosts(with_slots) if items else None, hostfile)
    return tuple(host.name for host in found)
