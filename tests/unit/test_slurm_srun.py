"""srun's command for a plan in an allocation."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar, into_tasks
from hvdtrain.launch.hosts import Host, parse_hosts
from hvdtrain.launch.launch_command import Site
from hvdtrain.launch.launchers.srun import (
    choose_launcher,
    choose_srun_controller,
    prepare,
    srun_argv,
    used_hosts,
)
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program
from hvdtrain.launch.slurm.allocation import Allocation


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return Path("train.py")


def allocation(hosts: str = "n1:2,n2:2", **more: Any) -> Allocation:
    named = parse_hosts(hosts)
    values: dict[str, Any] = {
        "job_id": "7",
        "hosts": named,
        "cores": tuple(host.slots for host in named),
        "cores_per_task": None,
        "this_node": "n1",
    }
    return Allocation(**values | more)


def plan(
    script: Path, hosts: str, np: int, *arguments: str, python: str = "python3", **more: Any
) -> LaunchPlan:
    values: dict[str, Any] = {"controller": "gloo", "launcher": "srun"}
    program = Program(script, arguments, python=python)
    return LaunchPlan(program=program, hosts=parse_hosts(hosts), np=np, **values | more)


COMMON = "--export=ALL --input=0 --kill-on-bad-exit=1"


@pytest.mark.parametrize(
    ("hosts", "np", "cores", "options"),
    [
        (
            "n1:2,n2:2",
            4,
            (2, 2),
            "--nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=n1,n2 --distribution=block",
        ),
        (
            "n1:2,n2:2",
            2,
            (2, 2),
            "--nodes=1 --ntasks=2 --ntasks-per-node=2 --nodelist=n1 --distribution=block",
        ),
        (
            "n1:2,n2:2",
            3,
            (2, 2),
            "--nodes=2 --ntasks=3 --nodelist=n1,n1,n2 --distribution=arbitrary",
        ),
        (
            "n2:4,n1:4",
            8,
            (4, 2),
            "--nodes=2 --ntasks=8 --nodelist=n2,n2,n2,n2,n1,n1,n1,n1 --distribution=arbitrary "
            "--overcommit",
        ),
        (
            "n2:2,n1:2",
            2,
            (2, 2),
            "--nodes=1 --ntasks=2 --ntasks-per-node=2 --nodelist=n2 --distribution=block",
        ),
    ],
)
def test_where_the_ranks_are(
    script: Path, hosts: str, np: int, cores: tuple[int, ...], options: str
) -> None:
    argv = srun_argv(plan(script, hosts, np), allocation(cores=cores))
    assert shlex.join(argv) == f"srun {options} --immediate=300 --mpi=none {COMMON}"


def test_cores_per_task_are_asked_for_again(script: Path) -> None:
    wanted = plan(script, "n1:2,n2:2", 4)
    assert "--cpus-per-task=3" in srun_argv(wanted, allocation(cores=(6, 6), cores_per_task=3))
    argv = srun_argv(wanted, allocation(cores=(5, 5), cores_per_task=3))
    assert "--overcommit" in argv and "--cpus-per-task=3" not in argv


def test_srun_waits_no_longer_than_the_start_may_take(script: Path) -> None:
    wanted = plan(script, "n1:2,n2:2", 4, start_timeout=45)
    assert "--immediate=45" in srun_argv(wanted, allocation())


def test_inside_a_step_the_cores_are_shared_with_it(script: Path) -> None:
    wanted = plan(script, "n1:2,n2:2", 4)
    assert "--overlap" in srun_argv(wanted, allocation(in_step=True))
    assert "--overlap" not in srun_argv(wanted, allocation())


def test_mpi_goes_by_pmix(script: Path) -> None:
    argv = srun_argv(plan(script, "n1:2,n2:2", 4, controller="mpi"), allocation())
    assert "--mpi=pmix" in argv


def test_the_whole_command(script: Path) -> None:
    wanted = plan(
        script,
        "n1:2,n2:2",
        4,
        *("--epochs", "3"),
        fusion_threshold_mb=64,
        env=(EnvVar("DATA", "/a b"), EnvVar("API_KEY")),
    )
    launch = prepare(wanted, Site({}, allocation=allocation()))
    assert launch.argv == list(launch.words)
    assert shlex.join(launch.typed) == (
        "env 'DATA=/a b' HVDTRAIN_FORWARD=DATA,API_KEY "
        f"{sys.executable} -P -m hvdtrain.start.run_srun "
        "-np 4 --gloo -H n1:2,n2:2 --start-timeout 32 --fusion-threshold-mb 64 "
        "--stall-check-warning-time-seconds 20 --stall-check-shutdown-time-seconds 50 "
        "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=n1,n2 --distribution=block "
        f"--immediate=300 --mpi=none {COMMON} "
        "python3 -P -m hvdtrain.start.slurm_task python3 -P -m hvdtrain.worker train.py --epochs 3"
    )


@pytest.mark.parametrize(
    ("image", "tail"),
    [
        (
            "/images/train.sif",
            f"{sys.executable} -P -m hvdtrain.start.slurm_task apptainer exec --nv --bind /data --pwd /data "
            "/images/train.sif python3 -P -m hvdtrain.worker train.py",
        ),
        (
            "docker://ghcr.io/a/b:1",
            f"{sys.executable} -P -m hvdtrain.start.slurm_task apptainer exec --nv --bind /data --pwd /data "
            "docker://ghcr.io/a/b:1 python3 -P -m hvdtrain.worker train.py",
        ),
        (
            "nvcr.io#nvidia/tensorflow:25.02",
            "--container-image=nvcr.io#nvidia/tensorflow:25.02 --container-mounts=/data:/data "
            "--container-workdir=/data python3 -P -m hvdtrain.start.slurm_task python3 -P -m hvdtrain.worker train.py",
        ),
    ],
)
def test_ranks_in_containers(script: Path, image: str, tail: str) -> None:
    site = Site({}, folder="/data", allocation=allocation(), image=image)
    launch = prepare(plan(script, "n1:2,n2:2", 4, python="/venv/bin/python"), site)
    assert " ".join(launch.argv).endswith(f"{COMMON} {tail}")


ONE = parse_hosts("n1:2")
TWO = parse_hosts("n1:2,n2:2")


@pytest.mark.parametrize(
    ("wanted", "job", "hosts", "launcher"),
    [
        ("auto", None, TWO, "horovodrun"),
        ("auto", allocation(), TWO, "srun"),
        ("auto", allocation("n1:2"), ONE, "horovodrun"),
        # salloc may leave the user on a login node.
        ("auto", allocation("n1:2", this_node=None), ONE, "srun"),
        # The user's own hosts, outside of the job.
        ("auto", allocation(), parse_hosts("a:2,b:2"), "horovodrun"),
        ("horovodrun", allocation(), TWO, "horovodrun"),
        ("srun", allocation("n1:2"), ONE, "srun"),
    ],
)
def test_the_launcher(
    wanted: str, job: Allocation | None, hosts: Sequence[Host], launcher: str
) -> None:
    assert choose_launcher(wanted, job, hosts) == launcher


def test_where_srun_cannot_work() -> None:
    with pytest.raises(UsageError, match="works only inside a Slurm job"):
        choose_launcher("srun", None, TWO)
    with pytest.raises(UsageError, match=r"x: not a node of job 7, which has n1:2, n2:2"):
        choose_launcher("srun", allocation(), parse_hosts("n1:1,x:1"))


def test_the_controller_of_srun() -> None:
    assert choose_srun_controller("auto", frozenset({"mpi", "gloo"})) == "gloo"
    assert choose_srun_controller("auto", frozenset({"mpi"})) == "mpi"
    assert choose_srun_controller("mpi", frozenset({"mpi", "gloo"})) == "mpi"


def test_hosts_are_filled_in_order() -> None:
    hosts = parse_hosts("a:2,b:2,c:2")
    assert used_hosts(hosts, 3) == parse_hosts("a:2,b:1")
    assert used_hosts(hosts, 6) == hosts


def test_what_travels() -> None:
    environ = {"PATH": "/bin", "HOME": "/root", "SLURM_CONF": "/c", "MY_TOKEN": "x", "DATA": "y"}
    kept = into_tasks(environ, ["DATA"])
    assert sorted(kept) == ["DATA", "HOME", "PATH", "SLURM_CONF"]


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n1",
}
ALONE = {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
HETEROGENEOUS = JOB | {"SLURM_HET_SIZE": "2"}
SINGLE = JOB | ALONE | {"SLURM_JOB_CPUS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        (JOB, "", "hvdtrain.start.run_srun -np 4 --gloo -H n1:2,n2:2 "),
        (JOB, "--controller mpi", "hvdtrain.start.run_srun -np 4 --mpi -H n1:2,n2:2 "),
        (JOB, "-np 3", "srun --nodes=2 --ntasks=3 --nodelist=n1,n1,n2 "),
        # All on this node.
        (JOB, "-np 2 --controller gloo", "horovodrun -np 2 --gloo --stall"),
        (JOB, "--launcher horovodrun", "horovodrun -np 4 --mpi -H n1:2,n2:2 "),
        (HETEROGENEOUS, "-H n1:2,n2:2", "horovodrun -np 4 --mpi -H n1:2,n2:2 "),
        (JOB, "-H a:1,b:1", "horovodrun -np 2 --mpi -H a:1,b:1 "),
        (JOB, "--container x.sif", "apptainer exec --nv "),
        (SINGLE, "--controller gloo", "horovodrun -np 2 --gloo --stall"),
        (SINGLE, "-np 3 --controller gloo", "horovodrun -np 3 --gloo --stall"),
        (SINGLE, "--launcher srun", "hvdtrain.start.run_srun -np 2 --gloo -H n1:2 "),
        (SINGLE | {"SLURMD_NODENAME": ""}, "", "hvdtrain.start.run_srun -np 2 --gloo -H n1:2 "),
        (
            JOB,
            "--min-np 2 -np 2 -H a:1,b:1",
            "horovodrun -np 2 --gloo -H a:1,b:1 ",
        ),
    ],
)
def test_run_in_a_job(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    options: str,
    expected: str,
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        if value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "hvdtrain.launch.planning.installed_controllers", lambda: frozenset({"mpi", "gloo"})
    )
    monkeypatch.setattr("hvdtrain.launch.launch_command.find_mpirun", lambda: "/usr/bin/mpirun")
    result = CliRunner().invoke(main, ["run", "--dry-run", *options.split(), "train.py"])
    assert result.exit_code == 0, result.output
    assert expected in result.stdout


@pytest.mark.parametrize("options", ["", "-H n1:2,n2:2 --launcher srun"])
@pytest.mark.parametrize("strategy", ["", "--strategy parameter-server --workers 2"])
def test_a_heterogeneous_job(
    script: Path, monkeypatch: pytest.MonkeyPatch, options: str, strategy: str
) -> None:
    for name, value in HETEROGENEOUS.items():
        monkeypatch.setenv(name, value)
    asked = [*options.split(), *strategy.split()]
    result = CliRunner().invoke(main, ["run", "--dry-run", *asked, "train.py"])
    assert result.exit_code == 2
    assert "SLURM_HET_SIZE=2: srun would start workers only in one component" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-np 5", "-np 5 is more than the 4 slots of n1:2, n2:2"),
        ("--container x.sif --launcher horovodrun", "--container is for workers started by srun"),
        ("--launcher srun --min-np 2 -np 2", "leave it out for elastic training"),
        ("--launcher srun -H x:4", "x: not a node of job 7"),
    ],
)
def test_what_a_job_cannot_do(
    script: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["run", "--dry-run", *options.split(), "train.py"])
    assert result.exit_code == 2
    assert said in result.stderr
