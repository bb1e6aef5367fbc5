"""Each line of `hvdtrain doctor` about this machine: what turns it red, and the fix that is given."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_programs import path_with

from hvdtrain.doctor import checks as doctor_checks
from hvdtrain.doctor import machine, services
from hvdtrain.doctor.checks import Options, Result, names_in, run_checks
from hvdtrain.doctor.machine import (
    MEGABYTE,
    check_limits,
    check_log_folder,
    check_own_name,
    check_private_folder,
    check_shared_memory,
    check_temporary_folder,
    check_threads,
)
from hvdtrain.doctor.services import check_containers, check_slurm
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.devices import physical_cores
from hvdtrain.launch.running import timed_command


def statuses(results: Any) -> list[str]:
    return [result.status for result in results]


# Its name


def test_a_machine_without_an_address_for_its_name() -> None:
    def unknown(name: str) -> str:
        raise OSError(-2, "Name or service not known")

    found = check_own_name("node7", unknown, over_mpi=False)
    assert found.status == "fail"
    assert "node7 has no address (Name or service not known): workers crash over Gloo" in found.seen
    assert "127.0.0.1 node7" in found.fix
    # Seen on a host without an address for its name: over MPI, the default, ranks run.
    assert check_own_name("node7", unknown, over_mpi=True).status == "warn"
    assert check_own_name("node7", lambda name: "10.0.0.7", over_mpi=False).status == "ok"


def test_a_name_that_cannot_be_asked_for() -> None:
    """Python says so by another error than that of a name without an address."""
    found = check_own_name("node..7", socket.gethostbyname, over_mpi=False)
    assert found.status == "fail"
    assert "has no address (" in found.seen


# Memory, limits, threads


def space(size: int, free: int) -> Callable[[Path], Any]:
    return lambda folder: SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=MEGABYTE)


@pytest.mark.parametrize(
    ("size", "free", "status", "fix"),
    [
        (8192, 8000, "ok", ""),
        (64, 60, "warn", "--shm-size=1g"),
        (64, 10, "fail", "--shm-size=1g"),
        (8192, 3, "fail", "delete leftover files there"),
    ],
)
def test_shared_memory(size: int, free: int, status: str, fix: str, tmp_path: Path) -> None:
    finding = check_shared_memory(tmp_path, space(size, free))
    assert finding.status == status
    assert fix in finding.fix
    assert f"{free} MB free" in finding.seen or status == "ok"


def test_no_shared_memory(tmp_path: Path) -> None:
    finding = check_shared_memory(tmp_path / "shm", os.statvfs)
    assert finding.status == "fail"
    assert "No such file" in finding.seen
    assert finding.fix.startswith("mount -t tmpfs")


def test_folders_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_log_folder({"HVDTRAIN_LOG_DIR": str(tmp_path / "new/logs")}).status == "ok"
    monkeypatch.chdir(tmp_path)
    assert check_log_folder({}).status == "ok"
    found = check_temporary_folder({"TMPDIR": str(tmp_path / "new")})
    assert (found.status, found.seen) == ("ok", f"{tmp_path}/new (TMPDIR) is writable")
    assert check_temporary_folder({}).seen == "/tmp is writable"
    assert check_private_folder().status == "ok"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for root, who may write anywhere but in /proc."""
    monkeypatch.chdir("/proc")
    found = check_log_folder({})
    assert found.status == "warn", "a run takes another folder"
    assert found.seen.startswith(".hvdtrain/logs: ")
    assert "--log-dir" in found.fix
    assert check_log_folder({"HVDTRAIN_LOG_DIR": "logs"}).status == "fail", "a run refuses it"
    monkeypatch.chdir(tmp_path)
    Path(".hvdtrain").touch()
    assert check_log_folder({}).status == "warn", "a file is in its place"
    found = check_temporary_folder({"TMPDIR": "/proc/scratch", "TMP": str(tmp_path)})
    assert found.status == "fail"
    assert "/proc/scratch (TMPDIR)" in found.seen
    assert "export TMPDIR=" in found.fix

    def refused(launch_id: str, variables: object) -> Path:
        raise HvdtrainError("/tmp/hvdtrain-7 is not a private folder of this user")

    monkeypatch.setattr(machine, "deliver", refused)
    found = check_private_folder()
    assert (found.status, "not a private folder" in found.seen) == ("fail", True)


def test_a_shared_memory_that_cannot_be_written() -> None:
    found = check_shared_memory(Path("/proc"), space(8192, 8000))
    assert found.status == "fail"
    assert found.fix.startswith("chmod 1777")


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
    findings = {f.name: f for f in check_limits(limits(**changed), tmp_path)}
    assert findings[name].status == status
    assert fix in findings[name].fix
    assert {f.status for f in findings.values() if f.name != name} == {"ok"}


def test_folders_that_this_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read any folder
    assert names_in(tmp_path) == []


def test_locked_memory_without_infiniband_is_no_fault(tmp_path: Path) -> None:
    findings = check_limits(limits(MEMLOCK=(2**16, 2**16)), tmp_path / "none")
    assert set(statuses(findings)) == {"ok"}


@pytest.mark.parametrize(
    ("environ", "quota", "expected", "fix"),
    [
        ({}, None, ["ok", "ok"], ""),
        ({}, 2.0, ["warn", "ok"], "TF_NUM_INTRAOP_THREADS=2"),
        ({"OMP_NUM_THREADS": "2"}, 2.0, ["ok", "ok"], ""),
        ({"OMP_NUM_THREADS": "2,1"}, None, ["ok", "ok"], ""),
        ({"OMP_NUM_THREADS": "16, 1"}, None, ["ok", "warn"], "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "0"}, None, ["ok", "warn"], "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "2,"}, None, ["ok", "fail"], "unset OMP_NUM_THREADS"),
        ({"TF_NUM_INTRAOP_THREADS": "2,1"}, None, ["ok", "fail"], "unset TF_NUM_INTRAOP_THREADS"),
        ({"OMP_NUM_THREADS": "two"}, None, ["ok", "fail"], "unset OMP_NUM_THREADS"),
        ({"TF_NUM_INTEROP_THREADS": "64"}, None, ["ok", "warn"], "unset TF_NUM_INTEROP_THREADS"),
    ],
)
def test_threads(
    environ: dict[str, str], quota: float | None, expected: list[str], fix: str
) -> None:
    findings = check_threads(environ, 8, quota)
    assert statuses(findings) == expected
    assert fix in "".join(finding.fix for finding in findings)


# Slurm


PLUGINS = 'echo "MPI plugin types are..."; echo none; echo pmi2; echo pmix'


def slurm(tmp_path: Path, limit: float = 10, **programs: str) -> dict[str, Result]:
    configuration = tmp_path / "slurm.conf"
    configuration.touch()
    environ = path_with(tmp_path / "bin", programs)
    return {f.name: f for f in check_slurm(environ, limit, [configuration])}


def test_slurm_that_works(tmp_path: Path) -> None:
    sinfo = 'echo "gpu*|3|idle"; echo "gpu*|1|down*"; echo "cpu|2|mix"'
    found = slurm(tmp_path, sinfo=sinfo, srun=PLUGINS)
    assert found["Slurm"] == Result("Slurm", "ok", "gpu: 4 nodes (1 down), cpu: 2 nodes")
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
        ("/bin/sleep 60", "took longer than 5 s", "scontrol ping"),
    ],
)
def test_slurm_that_does_not_answer(sinfo: str, seen: str, fix: str, tmp_path: Path) -> None:
    # Half of it for each of them, in which a program must answer that only has to start.
    limit = 10
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


def test_programs_that_end_without_a_word(tmp_path: Path) -> None:
    found = slurm(tmp_path, sinfo="exit 3", srun="kill -9 $$")
    assert found["Slurm"].seen == "ended with exit code 3, with no output"
    assert found["srun --mpi"].seen == "ended by signal 9, with no output"


def test_docker_and_podman_that_hang_and_cannot_be_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a check says of them comes before its own time is over, which would be a failure."""
    # All waits are a third of their length.
    monkeypatch.setattr(timed_command, "COMMAND_SECONDS", timed_command.COMMAND_SECONDS / 3)
    monkeypatch.setattr(doctor_checks, "_SPARE_SECONDS", doctor_checks._SPARE_SECONDS / 3)
    deaf = "trap '' TERM; while :; do /bin/sleep 1; done"
    environ = path_with(tmp_path, {"docker": deaf, "podman": deaf})
    looks = [
        check for check in services.checks(Options(environ, limit=0.2)) if check.name != "Slurm"
    ]
    ((_, answer),) = run_checks(looks)
    results = answer.result()
    assert statuses(results) == ["skip", "skip", "skip"]


def test_no_slurm_and_no_cluster_are_skipped(tmp_path: Path) -> None:
    assert statuses(check_slurm(path_with(tmp_path, {}), 1, [])) == ["skip"]
    installed = path_with(tmp_path, {"sinfo": "exit 1", "srun": "exit 1"})
    assert statuses(check_slurm(installed, 1, [tmp_path / "none"])) == ["skip"]
    assert "fail" in statuses(check_slurm({**installed, "SLURM_CONF": "x"}, 1, []))


# Containers


DOCKER = 'echo \'{"ServerVersion": "24.0.5", "Runtimes": {"runc": {}}}\''
PODMAN = 'echo \'{"version": {"Version": "4.3.1"}}\''
DENIED = "echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1"
STOPPED = "echo 'Cannot connect to the Docker daemon. Is the docker daemon running?' >&2; exit 1"


def containers(tmp_path: Path, **programs: str) -> list[Result]:
    environ = path_with(tmp_path / "bin", programs)
    return list(check_containers(environ, 10, [tmp_path / "cdi"]))


@pytest.mark.parametrize(
    ("docker", "fix"),
    [
        (DENIED, "usermod -aG docker"),
        (STOPPED, "systemctl start docker"),
        ("echo", "systemctl start"),
    ],
)
def test_docker_that_does_not_work_is_no_failure(docker: str, fix: str, tmp_path: Path) -> None:
    """Training needs none: only `hvdtrain docker` does."""
    note, gpu = containers(tmp_path, docker=docker)
    assert (note.name, note.status, gpu.status) == ("docker", "skip", "skip")
    assert fix in note.fix


def test_docker_and_podman(tmp_path: Path) -> None:
    docker, podman, _ = containers(tmp_path, docker=STOPPED, podman=PODMAN)
    assert (docker.status, podman.status, podman.seen) == ("skip", "ok", "works, version 4.3.1")
    broken, _ = containers(tmp_path / "other", podman="echo 'no subuid' >&2; exit 125")[:2]
    assert (broken.status, broken.seen) == ("skip", "no subuid")
    assert "subuid" in broken.fix


def test_no_containers_here(tmp_path: Path) -> None:
    assert statuses(containers(tmp_path)) == ["skip"]


def test_gpus_in_containers(tmp_path: Path) -> None:
    smi = {"nvidia-smi": "exit 0"}
    docker, podman = containers(tmp_path / "a", docker=DOCKER, podman=PODMAN, **smi)[2:]
    assert (docker.status, podman.status) == ("warn", "warn")
    assert "nvidia-ctk runtime configure" in docker.fix
    assert "nvidia-ctk cdi generate" in podman.fix
    denied = containers(tmp_path / "d", docker=DENIED, **smi)
    assert statuses(denied) == ["skip"], "nothing to say of the GPUs in what does not work"
    with_runtime = DOCKER.replace("runc", "nvidia")
    assert containers(tmp_path / "b", docker=with_runtime, **smi)[1].status == "ok"
    (tmp_path / "c/cdi").mkdir(parents=True)
    (tmp_path / "c/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    assert containers(tmp_path / "c", podman=PODMAN, **smi)[1].status == "ok"


def test_physical_cores(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({3, 7, 8}, tmp_path) == 3, "7 and 8 tell nothing"
