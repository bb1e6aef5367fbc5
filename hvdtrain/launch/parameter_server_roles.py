"""The processes of a launch with parameter servers: their roles, hosts and environment. Pure functions.

The chief runs the user's script and coordinates, workers compute steps on request, and servers
hold the variables. Each process finds the others through TF_CONFIG, in TensorFlow's format
(tensorflow.org/guide/distributed_training).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.environment import RANK_CORES
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.strategy_names import PARAMETER_SERVER, STRATEGY
from hvdtrain.worker.rank_environment import rank_environment

Kind = Literal["chief", "worker", "ps"]

_PROXY = "no_grpc_proxy"


@dataclass(frozen=True)
class Role:
    """One process, numbered from 0 among those of its kind."""

    kind: Kind
    index: int

    @property
    def name(self) -> str:
        return "chief" if self.kind == "chief" else f"{self.kind}-{self.index}"


CHIEF = Role("chief", 0)


def all_roles(workers: int, servers: int) -> tuple[Role, ...]:
    """Return all roles: the chief, the workers, then the servers."""
    return (
        CHIEF,
        *(Role("worker", index) for index in range(workers)),
        *(Role("ps", index) for index in range(servers)),
    )


def assign_hosts(roles: Sequence[Role], hosts: Sequence[Host]) -> dict[Role, str]:
    """Assign each worker and server to a host.

    The servers come first, then the workers, one per host in turn; full hosts are skipped. The chief
    runs where the launch starts and needs no slot.

    Raises:
        UsageError: There are not enough slots.
    """
    wanted = [role for kind in ("ps", "worker") for role in roles if role.kind == kind]
    slots = sum(host.slots for host in hosts)
    if len(wanted) > slots:
        raise UsageError(
            f"{len(wanted)} workers and servers are more than the {slots} slots of "
            f"{', '.join(map(str, hosts))}: lower --workers or --ps, or give the hosts more slots"
        )
    rounds = range(max((host.slots for host in hosts), default=0))
    seats = [host.name for turn in rounds for host in hosts if host.slots > turn]
    return dict(zip(wanted, seats, strict=False))


def tf_config(addresses: Mapping[Role, str], role: Role) -> str:
    """Return the TF_CONFIG of one process. `addresses` maps every role to `host:port`."""
    cluster: dict[str, list[str]] = {}
    for one in sorted(addresses, key=lambda one: (one.kind, one.index)):
        cluster.setdefault(one.kind, []).append(addresses[one])
    task = {"type": role.kind, "index": role.index}
    return json.dumps({"cluster": cluster, "task": task})


def role_environment(addresses: Mapping[Role, str], role: Role) -> dict[str, str]:
    """Return the variables of one process, independent of its host."""
    hosts = sorted({address.rpartition(":")[0] for address in addresses.values()})
    return {
        STRATEGY: PARAMETER_SERVER,
        "TF_CONFIG": tf_config(addresses, role),
        # Otherwise gRPC would use a configured web proxy between the processes, too.
        _PROXY: ",".join(hosts),
    }


def host_environment(
    environ: Mapping[str, str],
    kind: Kind,
    index: int,
    *,
    processes: int,
    workers: int,
    cores: int,
    gpus: Sequence[str],
) -> dict[str, str]:
    """Return the variables that give a process its share of the host.

    Cores are divided equally. A worker has its own GPU, or shares one if there are more workers than
    GPUs. The chief and the servers see no GPU, because TensorFlow would take all of its memory.

    Args:
        environ: Current environment of the process. Its values are kept, except for the GPUs.
        kind: Kind of the process.
        index: Index of the process among the workers of this host.
        processes: Number of processes of this launch on this host.
        workers: Number of workers in the whole launch.
        cores: Number of cores that the processes share.
        gpus: Names of the GPUs, as for CUDA_VISIBLE_DEVICES.
    """
    found = rank_environment({**environ, RANK_CORES: str(max(1, cores // processes))}, cores)
    if "TF_NUM_INTEROP_THREADS" in found:
        # Calls from every worker to a server, and from a worker to every server, can block at the same time.
        threads = max(int(found["TF_NUM_INTEROP_THREADS"]), workers + 1)
        found["TF_NUM_INTEROP_THREADS"] = str(threads)
    if kind != "worker":
        return {**found, "CUDA_VISIBLE_DEVICES": ""} if gpus else found
    if not gpus:
        return found
    found["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    growth = "TF_FORCE_GPU_ALLOW_GROWTH"
    return found if growth in environ else {**found, growth: "true"}
