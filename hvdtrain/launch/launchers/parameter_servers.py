"""Launch a parameter server strategy (a chief, workers and parameter servers): its settings and its command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.launch_command import LaunchCommand, Site, values_of
from hvdtrain.launch.launchers.horovodrun import start_timeout
from hvdtrain.launch.parameter_server_roles import all_roles, assign_hosts
from hvdtrain.launch.plan_validation import check_servers
from hvdtrain.launch.rank_program import Program, rank_command
from hvdtrain.launch.running.process_names import ProcessNames
from hvdtrain.strategy_names import PARAMETER_SERVER


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Settings of a launch with parameter servers.

    Attributes:
        program: Program that the chief runs.
        env: Variables for all processes. A secret has no value here, only in the environment.
        workers: Number of workers, at least 1.
        servers: Number of parameter servers, at least 1.
        hosts: Hosts for workers and servers. If empty, this machine.
        by_srun: Whether the hosts are nodes of this Slurm job, reached with srun instead of ssh.
        ssh_port: Port of ssh on the other hosts. None leaves it to ssh and its configuration.
        ssh_identity_file: Private key for the other hosts. None leaves it to ssh and its configuration.
        start_timeout: Seconds within which the hosts must answer. None allows more for more hosts.

    Raises:
        UsageError: A number is out of range, or the hosts have too few slots.
    """

    program: Program
    env: tuple[EnvVar, ...] = ()
    workers: int
    servers: int
    hosts: tuple[Host, ...] = ()
    by_srun: bool = False
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    start_timeout: int | None = None

    def __post_init__(self) -> None:
        check_servers(PARAMETER_SERVER, self.workers, self.servers)
        if self.hosts:
            assign_hosts(all_roles(self.workers, self.servers), self.hosts)

    @property
    def process_names(self) -> ProcessNames:
        return ProcessNames(tuple(role.name for role in all_roles(self.workers, self.servers)))


def prepare(plan: ServerPlan, site: Site) -> LaunchCommand:
    """Prepare `[env NAME=VALUE...] python -m hvdtrain.start.run_parameter_servers OPTIONS -- COMMAND`."""
    options: list[tuple[str, object]] = [
        ("--workers", plan.workers),
        ("--ps", plan.servers),
        ("--hosts", ",".join(map(str, plan.hosts)) or None),
        ("--ssh-port", plan.ssh_port),
        ("--ssh-identity-file", plan.ssh_identity_file),
        ("--start-timeout", start_timeout(plan.start_timeout, len(plan.hosts))),
        *(("--env", one.name) for one in plan.env),
    ]
    return LaunchCommand(
        words=(
            *(sys.executable, "-P", "-m", "hvdtrain.start.run_parameter_servers"),
            *(word for name, value in options if value is not None for word in (name, str(value))),
            *(["--srun"] if plan.by_srun else []),
            "--",
            *rank_command(plan.program),
        ),
        settings=dict(values_of(plan.env)),
        process_names=plan.process_names,
    )


def number_of_workers(workers: int | None, servers: int, hosts: Sequence[Host]) -> int:
    """Return `workers`, or if it is None the number of slots that the servers leave free.

    Raises:
        UsageError: The number is not given, and no slots are left for workers.
    """
    if workers is not None:
        return workers
    slots = sum(host.slots for host in hosts)
    if slots > servers:
        return slots - servers
    raise UsageError(
        "the number of workers is missing: add --workers N, or pass hosts with enough slots with -H"
    )


def roomy(hosts: Sequence[Host], processes: int) -> tuple[Host, ...]:
    """Return the nodes of a job, with their slots raised if needed to hold this many processes."""
    each = -(-processes // len(hosts))
    if sum(host.slots for host in hosts) >= processes:
        return tuple(hosts)
    return tuple(Host(host.name, max(host.slots, each)) for host in hosts)
