"""A real Slurm for the tests: munged, slurmctld and a slurmd for each node, all on this machine.

The nodes share the machine's network and differ in port and name, as Slurm allows for tests of itself.
Two partitions: `main`, whose jobs a job in `high` preempts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import user_environment

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
PACKAGES = "slurm-wlm slurm-client munge libpmi2-0 libpmi0"
SECONDS = 100
CONFIGURATION = """\
ClusterName=hvdtrain-test
SlurmctldHost={machine}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
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
    """A running Slurm. Jobs are asked for in the environment that `environment` gives."""

    folder: Path
    nodes: tuple[str, ...]

    def environment(self, **changes: str) -> dict[str, str]:
        return user_environment(SLURM_CONF=str(self.folder / "slurm.conf"), **changes)

    def run(self, *argv: str, cwd: Path | None = None, **changes: str) -> str:
        """What the command prints; fails the test if the command fails."""
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

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

    def steps_left(self, job_id: str) -> list[str]:
        """Processes on any node that still carry the job's id in their environment."""
        mark, ours = f"SLURM_JOB_ID={job_id}".encode(), str(self.folder).encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if mark in variables and any(ours in variable for variable in variables):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
        return found

    def cancel_all(self) -> None:
        """End every job, and wait until the nodes are free."""
        self.run("scancel", *(f"--partition={name}" for name in ("main",)))
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
    """A Slurm of `count` nodes n1, n2, ... with 4 cores each, whose files are all in `folder`."""
    names = tuple(f"n{number + 1}" for number in range(count))
    _write_files(folder, names)
    cluster = SlurmCluster(folder, names)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(
            _start(
                *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
                *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
                *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
                log=folder / "munged.out",
            )
        )
        _wait((folder / "munge.socket").exists, folder)
        conf = str(folder / "slurm.conf")
        environment = cluster.environment()
        daemons.append(
            _start("slurmctld", "-D", "-i", "-f", conf, log=folder / "out", env=environment)
        )
        daemons += [
            _start("slurmd", "-D", "-f", conf, "-N", name, log=folder / "out", env=environment)
            for name in names
        ]
        _wait(lambda: _idle_nodes(cluster) == count, folder)
        yield cluster
        cluster.cancel_all()
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes for all tests of the session."""
    if reason := missing():
        pytest.skip(reason)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _write_files(folder: Path, names: Sequence[str]) -> None:
    folder.chmod(0o755)  # munged wants nobody else to write here, and everyone to get to its socket.
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    for name in names:
        (folder / "spool" / name).mkdir(parents=True)
        (folder / "tmp" / name).mkdir(parents=True)
    (folder / "state").mkdir()
    machine = socket.gethostname().partition(".")[0]
    port, *ports = _free_ports(1 + len(names))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={number} CPUs=4 "
        "RealMemory=2000 Gres=gpu:2 State=UNKNOWN"
        for name, number in zip(names, ports, strict=True)
    )
    # Slurm counts files as GPUs if it is told so.
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, machine=machine, port=port, nodes=nodes)
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _start(
    *argv: str, log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    program = shutil.which(argv[0], path=_path())
    assert program is not None
    with log.open("ab") as file:
        return subprocess.Popen(
            [program, *argv[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _idle_nodes(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
    )
    return sum(int(line) for line in done.stdout.split() if line.isdecimal())


def _wait(is_ready: object, folder: Path) -> None:
    deadline = time.monotonic() + 30
    assert callable(is_ready)
    while not is_ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
            pytest.fail(f"Slurm does not start:\n{logs}")
        time.sleep(0.1)
