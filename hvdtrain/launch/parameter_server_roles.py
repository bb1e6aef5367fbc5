"""The processes of a launch with parameter servers: which, where, and with what environment.

One chief runs the user's script and directs; workers compute steps on request; servers
hold the variables. Each finds the others by TF_CONFIG, as TensorFlow lays it down
(tensorflow.org/guide/distributed_training). Pure functions.
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
    """One process; its number among those of its kind counts from 0."""

    kind: Kind
    index: int

    @property
    def name(self) -> str:
        return "chief" if self.kind == "chief" else f"{self.kind}-{self.index}"


CHIEF = Role("chief", 0)


def cast(workers: int, servers: int) -> tuple[Role, ...]:
    """All processes: chief, workers, servers."""
    return (
        CHIEF,
        *(Role("worker", index) for index in range(workers)),
        *(Role("ps", index) for index in range(servers)),
    )


def place(roles: Sequence[Role], hosts: Sequence[Host]) -> dict[Role, str]:
    """Worker or server -> its host: the servers first, one host after the other, then the workers
    from there on; a host that is full is passed over.

    The chief is not among them: it is where the launch starts, and needs no slot. Raises UsageError
    if there are not enough slots.
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
    """TF_CONFIG of one process; `addresses` are `host:port` of all."""
    cluster: dict[str, list[str]] = {}
    for one in sorted(addresses, key=lambda one: (one.kind, one.index)):
        cluster.setdefault(one.kind, []).append(addresses[one])
    task = {"type": role.kind, "index": role.index}
    return json.dumps({"cluster": cluster, "task": task})


def role_environment(addresses: Mapping[Role, str], role: Role) -> dict[str, str]:
    """The variables of one process, the same on any host."""
    hosts = sorted({address.rpartition(":")[0] for address in addresses.values()})
    return {
        STRATEGY: PARAMETER_SERVER,
        "TF_CONFIG": tf_config(addresses, role),
        # gRPC would go through the proxy for the web, if one is set, to the other processes too.
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
    """The variables that give a process its share of the host.

    The cores are shared equally. A worker has a GPU to itself, or shares it if there are more
    workers than GPUs; chief and servers use none, of which TensorFlow would take all memory.

    Args:
        environ: of the process so far; what is set there stays, but for the GPUs.
        kind: of the process.
        index: its number among the workers of this host.
        processes: of this launch on this host.
        workers: of the whole launch.
        cores: those that the processes share.
        gpus: what CUDA_VISIBLE_DEVICES may name here.
    """
    found = rank_environment({**environ, RANK_CORES: str(max(1, cores // processes))}, cores)
    if "TF_NUM_INTEROP_THREADS" in found:
        # A server's calls from every worker, and a worker's to every server, can wait at a time.
        threads = max(int(found["TF_NUM_INTEROP_THREADS"]), workers + 1)
        found["TF_NUM_INTEROP_THREADS"] = str(threads)
    if kind != "worker":
        return {**found, "CUDA_VISIBLE_DEVICES": ""} if gpus else found
    if not gpus:
        return found
    found["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    growth = "TF_FORCE_GPU_ALLOW_GROWTH"
    return found if growth in environ else {**found, growth: "true"}
