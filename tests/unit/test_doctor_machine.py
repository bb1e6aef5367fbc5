"""Each line of `hvdtrain doctor` about this machine: what turns it red, and the fix that is given."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_programs import path_with

from hvdtrain.doctor.containers import look_at_containers
from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.memory import MEGABYTE, look_at_limits, look_at_shared_memory
from hvdtrain.doctor.own_name import look_at_own_name
from hvdtrain.doctor.slurm import look_at_slurm
from hvdtrain.doctor.threads import look_at_threads
from hvdtrain.launch.cores import cgroup_quota, physical_cores


def statuses(findings: Any) -> list[str]:
    return [finding.status for finding in findings]


# Its name


def test_a_machine_without_an_address_for_its_name() -> None:
    def unknown(name: str) -> str:
        raise OSError(-2, "Name or service not known")

    (found,) = look_at_own_name("node7", unknown)
    assert found.status == "fail"
    assert "node7 has no address (Name or service not known)" in found.seen
    assert "127.0.0.1 node7" in found.fix
    (found,) = look_at_own_name("node7", lambda name: "10.0.0.7")
    assert found.status == "ok"


# Memory, limits, threads


def space(size: int, free: int) -> Callable[[Path], Any]:
    return lambda folder: SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=MEGABYTE)


@pytest.mark.parametrize(
    ("size", "free", "status", "fix"),
    [
        (8192, 8000, "ok", ""),
        (64, 60, "warn", "--shm-size=1g"),
        (64, 10, "fail", "--shm-size=1g"),
        (8192, 3, "fail", "delete what is left there"),
    ],
)
def test_shared_memory(size: int, free: int, status: str, fix: str) -> None:
    (finding,) = look_at_shared_memory(Path("/dev/shm"), space(size, free))
    assert finding.status == status
    assert fix in finding.fix
    assert f"{free} MB free" in finding.seen or status == "ok"


def test_no_shared_memory(tmp_path: Path) -> None:
    (finding,) = look_at_shared_memory(tmp_path / "shm", os.statvfs)
    assert finding.status == "fail"
    assert "No such file" in finding.seen
    assert finding.fix.startswith("mount -t tmpfs")


def limits(**changed: tuple[int, int]) -> Callable[[int], tuple[int, int]]:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    kinds = {getattr(resource, f"RLIMIT_{name}"): values for name, values in changed.items()}
    return lambda kind: kinds.get(kind, unlimited)


@pytest.mark.parametrize(
    ("changed", "name", "status", "fix"),
    [
        ({"NOFILE": (64, 4096)}, "ulimit -n", "fail", "ulimit -n 1024"),
        ({"NOFILE": (512, 4096)}, "ulimit -n", "warn", "ulimit -n 1024"),
        ({"NPROC": (100, 100)}, "ulimit -u", "fail", "Docker: --ulimit nproc=2048"),
        ({"STACK": (2**19, 2**30)}, "ulimit -s", "fail", "ulimit -s 4096"),
        ({"MEMLOCK": (2**16, 2**16)}, "ulimit -l", "fail", "Docker: --ulimit memlock=-1"),
    ],
)
def test_limits(
    changed: dict[str, tuple[int, int]], name: str, status: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    findings = {f.name: f for f in look_at_limits(limits(**changed), tmp_path)}
    assert findings[name].status == status
    assert fix in findings[name].fix
    assert {f.status for f in findings.values() if f.name != name} == {"ok"}


def test_locked_memory_without_infiniband_is_no_fault(tmp_path: Path) -> None:
    findings = look_at_limits(limits(MEMLOCK=(2**16, 2**16)), tmp_path / "none")
    assert set(statuses(findings)) == {"ok"}


@pytest.mark.parametrize(
    ("environ", "quota", "expected", "fix"),
    [
        ({}, None, ["ok", "ok"], ""),
        ({}, 2.0, ["warn", "ok"], "TF_NUM_INTRAOP_THREADS=2"),
        ({"OMP_NUM_THREADS": "2"}, 2.0, ["ok", "ok"], ""),
        ({"OMP_NUM_THREADS": "two"}, None, ["ok", "fail"], "unset OMP_NUM_THREADS"),
        ({"TF_NUM_INTEROP_THREADS": "64"}, None, ["ok", "warn"], "unset TF_NUM_INTEROP_THREADS"),
    ],
)
def test_threads(
    environ: dict[str, str], quota: float | None, expected: list[str], fix: str
) -> None:
    findings = look_at_threads(environ, 8, quota)
    assert statuses(findings) == expected
    assert fix in "".join(finding.fix for finding in findings)


def test_quota_is_the_least_on_the_way_to_the_root(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    (tmp_path / "outer/inner/cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path, own) is None
    (tmp_path / "outer/cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cgroup_quota(tmp_path, own) == 1.5


def test_quota_of_old_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:memory:/x\n4:cpu,cpuacct:/job\n")
    (tmp_path / "cpu/job").mkdir(parents=True)
    (tmp_path / "cpu/job/cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu/job/cpu.cfs_period_us").write_text("100000")
    assert cgroup_quota(tmp_path, own) == 2.0
    assert cgroup_quota(tmp_path, tmp_path / "none") is None


# Slurm


PLUGINS = 'echo "MPI plugin types are..."; echo none; echo pmi2; echo pmix'


def slurm(tmp_path: Path, limit: float = 10, **programs: str) -> dict[str, Finding]:
    configuration = tmp_path / "slurm.conf"
    configuration.touch()
    environ = path_with(tmp_path / "bin", programs)
    return {f.name: f for f in look_at_slurm(environ, limit, [configuration])}


def test_slurm_that_works(tmp_path: Path) -> None:
    sinfo = 'echo "gpu*|3|idle"; echo "gpu*|1|down*"; echo "cpu|2|mix"'
    found = slurm(tmp_path, sinfo=sinfo, srun=PLUGINS)
    assert found["Slurm"] == Finding("Slurm", "ok", "gpu: 4 nodes (1 down), cpu: 2 nodes")
    assert found["srun --mpi"].status == "ok"
    assert found["srun --mpi"].seen == "none, pmi2, pmix: srun starts ranks over MPI and Gloo"


@pytest.mark.parametrize(
    ("sinfo", "seen", "fix"),
    [
        (
            'echo "slurm_load_partitions: Unable to contact slurm controller (connect failure)" >&2; exit 1',
            "Unable to contact slurm controller",
            "start slurmctld",
        ),
        (
            'echo "error: Munge encode failed: no socket" >&2; exit 1',
            "Munge encode",
            "start munged",
        ),
        ('echo "all*|2|down*"', "all: 2 nodes (2 down)", "sinfo -R"),
        ("exit 0", "no partition", "administrator"),
        ("/bin/sleep 30", "took longer than 0.5 s", "scontrol ping"),
    ],
)
def test_slurm_that_does_not_answer(sinfo: str, seen: str, fix: str, tmp_path: Path) -> None:
    limit = 1 if "sleep" in sinfo else 10
    found = slurm(tmp_path, limit, sinfo=sinfo, srun=PLUGINS)
    assert found["Slurm"].status == "fail"
    assert seen in found["Slurm"].seen
    assert fix in found["Slurm"].fix
    assert found["srun --mpi"].status == "ok"


def test_srun_that_fails_or_is_missing(tmp_path: Path) -> None:
    sinfo = 'echo "gpu*|3|idle"'
    assert slurm(tmp_path, sinfo=sinfo)["srun --mpi"].fix == "install slurm-client"
    found = slurm(tmp_path, sinfo=sinfo, srun="echo 'srun: fatal: no plugin' >&2; exit 1")
    assert found["srun --mpi"].seen == "srun: fatal: no plugin"
    assert "slurm.conf" in found["srun --mpi"].fix


def test_no_slurm_and_no_cluster_are_skipped(tmp_path: Path) -> None:
    assert statuses(look_at_slurm(path_with(tmp_path, {}), 1, [])) == ["skip"]
    installed = path_with(tmp_path, {"sinfo": "exit 1", "srun": "exit 1"})
    assert statuses(look_at_slurm(installed, 1, [tmp_path / "none"])) == ["skip"]
    assert "fail" in statuses(look_at_slurm({**installed, "SLURM_CONF": "x"}, 1, []))


# Containers


DOCKER = "echo '24.0.5 {\"runc\":{}}'"
DENIED = "echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1"
STOPPED = "echo 'Cannot connect to the Docker daemon. Is the docker daemon running?' >&2; exit 1"


def containers(tmp_path: Path, **programs: str) -> list[Finding]:
    environ = path_with(tmp_path / "bin", programs)
    return list(look_at_containers(environ, 10, [tmp_path / "cdi"]))


@pytest.mark.parametrize(
    ("docker", "fix"),
    [
        (DENIED, "usermod -aG docker"),
        (STOPPED, "systemctl start docker"),
        ("echo", "systemctl start"),
    ],
)
def test_docker_that_does_not_work(docker: str, fix: str, tmp_path: Path) -> None:
    red, gpu = containers(tmp_path, docker=docker)
    assert (red.name, red.status, gpu.status) == ("docker", "fail", "skip")
    assert fix in red.fix


def test_one_of_docker_and_podman_is_enough(tmp_path: Path) -> None:
    docker, podman, _ = containers(tmp_path, docker=STOPPED, podman="echo 4.3.1")
    assert (docker.status, podman.status) == ("skip", "ok")
    broken, _ = containers(tmp_path / "other", podman="echo 'no subuid' >&2; exit 125")[:2]
    assert (broken.status, broken.seen) == ("fail", "no subuid")
    assert "subuid" in broken.fix


def test_no_containers_here(tmp_path: Path) -> None:
    assert statuses(containers(tmp_path)) == ["skip"]


def test_gpus_in_containers(tmp_path: Path) -> None:
    smi = {"nvidia-smi": "exit 0"}
    docker, podman = containers(tmp_path / "a", docker=DOCKER, podman="echo 4.3.1", **smi)[2:]
    assert (docker.status, podman.status) == ("fail", "fail")
    assert "nvidia-ctk runtime configure" in docker.fix
    assert "nvidia-ctk cdi generate" in podman.fix
    with_runtime = 'echo \'24.0.5 {"nvidia":{},"runc":{}}\''
    assert containers(tmp_path / "b", docker=with_runtime, **smi)[1].status == "ok"
    (tmp_path / "c/cdi").mkdir(parents=True)
    (tmp_path / "c/cdi/nvidia.yaml").touch()
    assert containers(tmp_path / "c", podman="echo 4.3.1", **smi)[1].status == "ok"


def test_physical_cores(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({3, 7, 8}, tmp_path) == 3, "7 and 8 tell nothing"
