"""A real Slurm for the tests: munged, slurmctld and a slurmd for each node.

The nodes are hosts of `namespaces`, so each has its own network and process table. The first one is
the login node as well: all commands of Slurm's run there. Two partitions: `main`, whose jobs a job in
`high` preempts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from jobs import user_environment
from namespaces import NamespaceHost, running_hosts

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
PACKAGES = "slurm-wlm slurm-client munge libpmix-dev"
SECONDS = 100
CONFIGURATION = """\
ClusterName=hvdtrain-test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
OverTimeLimit=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=3
MinJobAge=3600
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
JobRequeue=1
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=12
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running Slurm; its first host is where its commands run.

    Attributes:
        folder: of its files.
        hosts: its nodes.
    """

    folder: Path
    hosts: tuple[NamespaceHost, ...]

    def environment(self, **changes: str) -> dict[str, str]:
        conf = str(self.folder / "slurm.conf")
        return user_environment(SLURM_CONF=conf, PATH=_path(), **changes)

    def start(self, *argv: str, cwd: Path, **changes: str) -> subprocess.Popen[str]:
        """The command, running on the login node."""
        return subprocess.Popen(
            self.hosts[0].argv(["env", f"--chdir={cwd}", *argv]),
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *argv: str, cwd: Path | None = None, **changes: str) -> str:
        """What the command prints; fails the test if the command fails."""
        process = self.start(*argv, cwd=cwd or self.folder, **changes)
        stdout, stderr = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{argv}: {process.returncode}\n{stdout}{stderr}"
        return stdout

    def job(self, job_id: str) -> dict[str, str]:
        """`scontrol show job` as a dictionary."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id).splitlines()[0]
        return dict(item.split("=", 1) for item in shown.split() if "=" in item)

    def wait_for(self, job_id: str, *states: str) -> dict[str, str]:
        """Wait until the job is in one of the states; its `scontrol show job`."""
        deadline = time.monotonic() + SECONDS
        while (job := self.job(job_id))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job_id} is {job}"
            time.sleep(0.2)
        return job

    def start_again(self, job_id: str) -> dict[str, str]:
        """Start a requeued job now; its `scontrol show job` before.

        Slurm itself waits 2 minutes, so that the late end of the run before is not taken for the new one's.
        """
        job = self.wait_for(job_id, "PENDING")
        while any("slurmstepd" in line for line in self.left()):
            time.sleep(0.1)
        time.sleep(2)
        self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        return job

    def left(self, seconds: float = 0) -> list[str]:
        """What runs on any node beside Slurm itself, after waiting for it to end."""
        deadline = time.monotonic() + seconds
        return [line for host in self.hosts for line in host.left(deadline - time.monotonic())]

    def cancel_all(self) -> None:
        """End every job, and wait until the nodes are free."""
        self.run("scancel", "--partition=main")
        self.run("scancel", "--partition=high")
        deadline = time.monotonic() + SECONDS
        while self.run("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "starting a Slurm needs root"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if absent:
        return f"no {', '.join(absent)} here: scripts/cluster_packages.sh installs {PACKAGES}"
    return None


@contextlib.contextmanager
def running_slurm(folder: Path, count: int = 2) -> Iterator[SlurmCluster]:
    """A Slurm of `count` nodes n1, n2, ... with 4 cores and 2 "GPUs" each; its files are in `folder`."""
    names = [f"n{number + 1}" for number in range(count)]
    (folder / "hosts").mkdir()
    with running_hosts(folder / "hosts", names) as running, contextlib.ExitStack() as stack:
        hosts = tuple(running[name] for name in names)
        _write_files(folder, hosts)
        cluster = SlurmCluster(folder, hosts)
        environment = cluster.environment()
        log = stack.enter_context((folder / "daemons.log").open("ab"))

        def start(host: NamespaceHost, *argv: str) -> None:
            """The daemon ends with its host."""
            daemon = subprocess.Popen(
                host.argv(argv), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(daemon.wait, 10)
            stack.callback(daemon.terminate)

        start(
            hosts[0],
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        _wait((folder / "munge.socket").exists, folder)
        start(hosts[0], "slurmctld", "-D", "-i")
        for host in hosts:
            start(host, "slurmd", "-D", "-N", host.name)
        _wait(lambda: _idle_nodes(cluster) == count, folder)
        quiet = tuple(replace(one, quiet=frozenset(one.processes())) for one in hosts)
        yield SlurmCluster(folder, quiet)
        cluster.cancel_all()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes for all tests of the session."""
    if reason := missing():
        pytest.skip(reason)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _write_files(folder: Path, hosts: Sequence[NamespaceHost]) -> None:
    folder.chmod(
        0o755
    )  # munged wants nobody else to write here, and everyone to get to its socket.
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    (folder / "state").mkdir()
    for host in hosts:
        (folder / "spool" / host.name).mkdir(parents=True)
        (folder / "tmp" / host.name).mkdir(parents=True)
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=2000 Gres=gpu:2 State=UNKNOWN"
        for host in hosts
    )
    # Slurm counts files as GPUs if it is told so.
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    controller = f"{hosts[0].name}({hosts[0].address})"
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, controller=controller, nodes=nodes)
    )


def _path() -> str:
    return f"{user_environment()['PATH']}:/usr/sbin:/sbin"


def _idle_nodes(cluster: SlurmCluster) -> int:
    idle = ("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D")
    process = cluster.start(*idle, cwd=cluster.folder)
    stdout, _ = process.communicate()
    return sum(int(line) for line in stdout.split() if line.isdecimal())


def _wait(is_ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not is_ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
            pytest.fail(f"Slurm does not start:\n{logs}")
        time.sleep(0.1)
