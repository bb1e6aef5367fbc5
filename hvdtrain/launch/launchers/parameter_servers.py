"""A chief, workers and parameter servers: what such a launch consists of, and the command that starts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.launch_command import Prepared, Site, values_of
from hvdtrain.launch.launchers.horovodrun import start_timeout
from hvdtrain.launch.parameter_server_roles import cast, place
from hvdtrain.launch.plan_validation import check_servers
from hvdtrain.launch.rank_program import Program, rank_command
from hvdtrain.launch.running.process_names import ProcessNames
from hvdtrain.strategy_names import PARAMETER_SERVER


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """A launch with parameter servers. Raises UsageError for one that cannot work.

    Attributes:
        program: what the chief runs.
        env: variables for all; a secret has no value here, but in the environment.
        workers: number of workers, at least 1.
        servers: number of parameter servers, at least 1.
        hosts: for workers and servers; none: this machine.
        ssh_port, ssh_identity_file: None leaves it to ssh and its configuration.
        by_srun: whether srun reaches the hosts, which are nodes of this Slurm job; else ssh does.
        start_timeout: seconds within which the hosts must answer; None: more for more hosts.
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
            place(cast(self.workers, self.servers), self.hosts)

    @property
    def process_names(self) -> ProcessNames:
        return ProcessNames(tuple(role.name for role in cast(self.workers, self.servers)))


def prepare(plan: ServerPlan, site: Site) -> Prepared:
    """`[env NAME=VALUE...] python -m hvdtrain.start.run_parameter_servers OPTIONS -- COMMAND`."""
    options: list[tuple[str, object]] = [
        ("--workers", plan.workers),
        ("--ps", plan.servers),
        ("--hosts", ",".join(map(str, plan.hosts)) or None),
        ("--ssh-port", plan.ssh_port),
        ("--ssh-identity-file", plan.ssh_identity_file),
        ("--start-timeout", start_timeout(plan.start_timeout, len(plan.hosts))),
        *(("--env", one.name) for one in plan.env),
    ]
    return Prepared(
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
    """The requested number, or else the number of slots that the servers leave free.

    Raises UsageError if their number is not known.
    """
    if workers is not None:
        return workers
    slots = sum(host.slots for host in hosts)
    if slots > servers:
        return slots - servers
    raise UsageError(
        "the number of workers is missing: add --workers N, or name hosts with slots for them with -H"
    )


def roomy(hosts: Sequence[Host], processes: int) -> tuple[Host, ...]:
    """The nodes of a job, with enough slots for this many processes."""
    each = -(-processes // len(hosts))
    if sum(host.slots for host in hosts) >= processes:
        return tuple(hosts)
    return tuple(Host(host.name, max(host.slots, each)) for host in hosts)
