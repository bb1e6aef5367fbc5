"""What runs a script under a strategy that is not Horovod's: one process, or a chief, workers and
servers. Pure functions but for the questions to this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.devices import tpu_here, visible_gpus
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.members import Members
from hvdtrain.launch.roles import cast, is_place, place
from hvdtrain.launch.variables import EnvVar
from hvdtrain.strategy_names import CENTRAL_STORAGE, REPLICAS, STRATEGY, TPU, replicas_of


@dataclass(frozen=True)
class Script:
    """What the user wants to be run.

    Attributes:
        path: the training script.
        arguments: its own.
        env: variables for it; a secret has no value here, but in the environment.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "hvdtrain.worker", str(self.path), *self.arguments]


@dataclass(frozen=True)
class Ssh:
    """How other hosts are reached; None leaves it to ssh and its defaults."""

    port: int | None = None
    identity_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """A launch with parameter servers. Raises UsageError for one that cannot work.

    Attributes:
        hosts: for workers and servers; none: this machine.
        by_srun: whether srun reaches the hosts, which are nodes of this Slurm job; else ssh does.
        start_timeout: seconds within which the hosts must answer.
    """

    workers: int
    servers: int
    hosts: tuple[Host, ...] = ()
    by_srun: bool = False
    ssh: Ssh = field(default_factory=Ssh)
    start_timeout: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("--workers", self.workers), ("--ps", self.servers)):
            if number < 1:
                raise UsageError(f"{name} {number}: give at least 1")
        if self.hosts:
            place(cast(self.workers, self.servers), self.hosts)

    @property
    def members(self) -> Members:
        return Members(tuple(role.name for role in cast(self.workers, self.servers)))


def one_process_command(
    strategy: str, script: Script, replicas: int | None, environ: Mapping[str, str]
) -> list[str]:
    """`env NAME=VALUE... python -m hvdtrain.worker SCRIPT`, for the strategies of one process.

    Args:
        replicas: how many are wanted; None: as many as there are devices.
        environ: where the command runs; what would make a rank of the process is taken out.
    """
    settings = {
        STRATEGY: strategy,
        **({} if replicas is None else {REPLICAS: str(replicas)}),
        **_values(script.env),
    }
    unset = [word for name in sorted(filter(is_place, environ)) for word in ("-u", name)]
    return ["env", *unset, *_assignments(settings), *script.command]


def server_command(plan: ServerPlan, script: Script) -> list[str]:
    """`[env NAME=VALUE...] python -m hvdtrain.start.parameter_servers OPTIONS -- COMMAND`."""
    settings = _values(script.env)
    options: list[tuple[str, object]] = [
        ("--workers", plan.workers),
        ("--ps", plan.servers),
        ("--hosts", ",".join(map(str, plan.hosts)) or None),
        ("--ssh-port", plan.ssh.port),
        ("--ssh-identity-file", plan.ssh.identity_file),
        ("--start-timeout", plan.start_timeout),
        *(("--env", one.name) for one in script.env),
    ]
    return [
        *(["env", *_assignments(settings)] if settings else []),
        *(sys.executable, "-m", "hvdtrain.start.parameter_servers"),
        *(word for name, value in options if value is not None for word in (name, str(value))),
        *(["--srun"] if plan.by_srun else []),
        "--",
        *script.command,
    ]


def number_of_workers(workers: int | None, servers: int, hosts: Sequence[Host]) -> int:
    """How many were asked for, else as many as the hosts have slots for beside the servers.

    Raises UsageError if nothing says how many.
    """
    if workers is not None:
        return workers
    slots = sum(host.slots for host in hosts)
    if slots > servers:
        return slots - servers
    raise UsageError("how many workers? Give --workers N, or hosts with slots for them with -H")


def roomy(hosts: Sequence[Host], processes: int) -> tuple[Host, ...]:
    """The nodes of a job with slots for so many processes, at least those that they have."""
    each = -(-processes // len(hosts))
    if sum(host.slots for host in hosts) >= processes:
        return tuple(hosts)
    return tuple(Host(host.name, max(host.slots, each)) for host in hosts)


def check_here(strategy: str, replicas: int | None, environ: Mapping[str, str]) -> None:
    """Raise UsageError if this machine lacks what the strategy needs."""
    if strategy == CENTRAL_STORAGE and replicas is None and replicas_of(environ) is None:
        count = len(visible_gpus(environ))
        if count < 2:
            raise UsageError(
                f"strategy {CENTRAL_STORAGE} needs at least two GPUs in one machine, and there "
                f"{'is one' if count else 'is none'} here: give -np N for N replicas on the cores "
                "of this machine, or leave --strategy out"
            )
    if strategy == TPU and not tpu_here(environ):
        raise UsageError(
            f"strategy {TPU} needs a TPU, and there is none here (no device file /dev/accel* or "
            "/dev/vfio/*, and TPU_NAME is not set): start on a TPU virtual machine, set TPU_NAME "
            "to the name of yours, or leave --strategy out"
        )


def _values(env: Sequence[EnvVar]) -> dict[str, str]:
    return {one.name: one.value for one in env if one.value is not None}


def _assignments(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]
