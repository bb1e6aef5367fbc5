"""Which probes there are, in the order in which they are shown."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hvdtrain.doctor import gpus
from hvdtrain.doctor.allreduce import look_at_allreduce, look_at_local_allreduce
from hvdtrain.doctor.backend import look_at_backend
from hvdtrain.doctor.containers import look_at_containers
from hvdtrain.doctor.examination import Probe
from hvdtrain.doctor.finding import Finding, skip
from hvdtrain.doctor.horovod import EngineReport, load_engine
from hvdtrain.doctor.hosts import Request, look_at_host
from hvdtrain.doctor.memory import look_at_limits, look_at_shared_memory
from hvdtrain.doctor.own_name import OWN_NAME, look_at_own_name
from hvdtrain.doctor.slurm import look_at_slurm
from hvdtrain.doctor.ssh import Ssh
from hvdtrain.doctor.threads import look_at_threads
from hvdtrain.doctor.versions import look_at_versions
from hvdtrain.launch.cores import cgroup_quota
from hvdtrain.launch.engine import Controller
from hvdtrain.worker.rank_environment import available_cores

QUICK_SECONDS = 10.0
"""For what answers at once on a machine that works; less if the user allows less."""

ENGINE = "Horovod"
JOINT = "All hosts"
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
# The second: what slurmd fetched from slurmctld, where the file itself is not on the machine.
_SLURM_FILES = (
    Path("/etc/slurm/slurm.conf"),
    Path("/run/slurm/conf/slurm.conf"),
    Path("/etc/slurm-llnl/slurm.conf"),
)
_CONTROLLERS: tuple[Controller, ...] = ("gloo", "mpi")


@dataclass(frozen=True)
class Wanted:
    """What the user asks the doctor to look at.

    Attributes:
        hosts: names of hosts; empty: this machine only.
        ssh: how to reach them.
        interfaces: network interfaces to use between them.
        limit: seconds that one probe may take.
    """

    hosts: tuple[str, ...] = ()
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: tuple[str, ...] = ()
    limit: float = 60.0


def local_probes(wanted: Wanted, environ: Mapping[str, str]) -> list[Probe]:
    """The probes of this machine."""
    quick = min(QUICK_SECONDS, wanted.limit)
    affinity = available_cores()
    quota = cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return [
        Probe("Software", "versions", look_at_versions, quick, "software"),
        Probe(
            "Software",
            "Keras backend",
            lambda: look_at_backend(environ, Path.home()),
            quick,
            "software",
        ),
        Probe(
            "Machine",
            "shared memory",
            lambda: look_at_shared_memory(_SHM, os.statvfs),
            quick,
            "machine",
        ),
        Probe(
            "Machine",
            "limits",
            lambda: look_at_limits(resource.getrlimit, _INFINIBAND),
            quick,
            "machine",
        ),
        Probe(
            "Machine",
            "threads",
            lambda: look_at_threads(environ, affinity, quota),
            quick,
            "machine",
        ),
        Probe(
            "Machine",
            OWN_NAME,
            lambda: look_at_own_name(socket.gethostname(), socket.gethostbyname),
            quick,
            "machine",
        ),
        Probe(
            "Slurm", "Slurm", lambda: look_at_slurm(environ, quick, _SLURM_FILES), quick, "slurm"
        ),
        Probe(
            "Containers",
            "containers",
            lambda: look_at_containers(environ, quick, _CDI_FOLDERS),
            quick,
            "containers",
        ),
        *engine_probes(wanted.limit, environ),
    ]


def engine_probes(limit: float, environ: Mapping[str, str]) -> Iterator[Probe]:
    """Horovod's library, the GPUs, an allreduce by each controller: one after the other, for each fills the cores."""
    engine = _Engine(environ, limit)
    yield Probe(ENGINE, "Horovod loads", engine.load, limit, "engine")
    yield Probe(ENGINE, "GPUs", engine.look_at_gpus, 2 * limit, "engine")
    for controller in _CONTROLLERS:
        yield Probe(
            ENGINE,
            f"allreduce over {controller}",
            partial(engine.reduce, controller),
            limit,
            "engine",
        )


class _Engine:
    """Probes of which each needs to know how the one before it went."""

    def __init__(self, environ: Mapping[str, str], limit: float) -> None:
        self._environ = environ
        self._limit = limit
        self._report: EngineReport | None = None

    def load(self) -> Sequence[Finding]:
        self._report, finding = load_engine(self._environ, self._limit)
        return [finding]

    def look_at_gpus(self) -> Sequence[Finding]:
        listed = gpus.list_gpus(self._environ, min(QUICK_SECONDS, self._limit))
        if isinstance(listed, Finding):
            return [listed]
        chosen = gpus.visible(listed, self._environ)
        findings = [gpus.driver_finding(listed, chosen)]
        if chosen:
            findings += [
                gpus.tensorflow_finding(chosen, self._report),
                gpus.look_at_nccl(chosen, self._report, self._environ, self._limit),
            ]
        return findings

    def reduce(self, controller: Controller) -> Sequence[Finding]:
        if self._report is None:
            return [skip(f"allreduce over {controller}", "Horovod's library does not load")]
        return look_at_local_allreduce(controller, self._environ, self._limit)


def host_probes(wanted: Wanted, environ: Mapping[str, str]) -> list[Probe]:
    """The probes of each host."""
    limit = min(2 * QUICK_SECONDS, wanted.limit)
    request = Request(wanted.ssh, wanted.interfaces, environ, limit)

    def of(host: str) -> Probe:
        return Probe(
            f"Host {host}", host, lambda: look_at_host(host, request), limit, f"host {host}"
        )

    return [of(host) for host in wanted.hosts]


def joint_probes(wanted: Wanted, environ: Mapping[str, str]) -> list[Probe]:
    """An allreduce over one rank on each host, by each controller; for when each host is well."""
    where = ["-H", ",".join(f"{host}:1" for host in wanted.hosts)]
    if wanted.interfaces:
        where += ["--network-interfaces", ",".join(wanted.interfaces)]
    if wanted.ssh.port is not None:
        where += ["--ssh-port", str(wanted.ssh.port)]
    if wanted.ssh.identity_file is not None:
        where += ["--ssh-identity-file", str(wanted.ssh.identity_file)]

    def of(controller: Controller) -> Probe:
        def look() -> Sequence[Finding]:
            return look_at_allreduce(controller, len(wanted.hosts), where, environ, wanted.limit)

        return Probe(JOINT, f"allreduce over {controller}", look, wanted.limit, "hosts")

    return [of(controller) for controller in _CONTROLLERS]
