"""The commands of strategies that are not Horovod's, and what they need of a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_programs import path_with

from hvdtrain.errors import UsageError
from hvdtrain.launch.devices import tpu_here, visible_gpus
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.launch_command import Site
from hvdtrain.launch.launchers import one_process, parameter_servers
from hvdtrain.launch.launchers.one_process import check_here
from hvdtrain.launch.launchers.parameter_servers import ServerPlan, number_of_workers, roomy
from hvdtrain.launch.rank_program import Program
from hvdtrain.launch.running.process_names import ALONE

PROGRAM = Program(Path("train.py"), ("--epochs", "3"))
ENV = (EnvVar("A", "b c"), EnvVar("API_KEY"))
WORKER = [sys.executable, "-P", "-m", "hvdtrain.worker", "train.py", "--epochs", "3"]


def test_one_process() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "HOROVOD_RANK": "1", "HOME": "/"}
    tpu = one_process.prepare("tpu", PROGRAM, ENV, Site({}))
    assert (tpu.argv, tpu.process_names) == (WORKER, ALONE)
    assert tpu.typed == [
        *("env", "HVDTRAIN_STRATEGY=tpu", "A=b c"),
        *WORKER,
    ]
    central = one_process.prepare("central-storage", PROGRAM, ENV, Site(environ), 4)
    assert central.environment(environ) == {
        **{"HVDTRAIN_STRATEGY": "central-storage", "HVDTRAIN_REPLICAS": "4", "A": "b c"},
        "HOME": "/",
    }
    assert central.typed == [
        *("env", "-u", "HOROVOD_RANK", "-u", "OMPI_COMM_WORLD_RANK"),
        *("HVDTRAIN_STRATEGY=central-storage", "HVDTRAIN_REPLICAS=4", "A=b c"),
        *WORKER,
    ]


def test_servers_on_this_machine() -> None:
    plan = ServerPlan(program=Program(Path("train.py")), workers=3, servers=2)
    assert parameter_servers.prepare(plan, Site({})).typed == [
        *(
            sys.executable,
            "-P",
            "-m",
            "hvdtrain.start.run_parameter_servers",
            "--workers",
            "3",
            "--ps",
            "2",
        ),
        *("--", sys.executable, "-P", "-m", "hvdtrain.worker", "train.py"),
    ]


def test_servers_on_hosts_with_all_options() -> None:
    plan = ServerPlan(
        program=PROGRAM,
        env=ENV,
        workers=3,
        servers=1,
        hosts=parse_hosts("a:2,b:2"),
        by_srun=True,
        ssh_port=22,
        ssh_identity_file=Path("key"),
        start_timeout=9,
    )
    assert parameter_servers.prepare(plan, Site({})).typed == [
        *("env", "A=b c", sys.executable, "-P", "-m", "hvdtrain.start.run_parameter_servers"),
        *("--workers", "3", "--ps", "1", "--hosts", "a:2,b:2", "--ssh-port", "22"),
        *("--ssh-identity-file", "key", "--start-timeout", "9", "--env", "A", "--env", "API_KEY"),
        *("--srun", "--", *WORKER),
    ]
    assert plan.process_names.roles == ("chief", "worker-0", "worker-1", "worker-2", "ps-0")


@pytest.mark.parametrize(
    ("workers", "servers", "hosts", "message"),
    [
        (0, 1, "a:2", "--workers 0: must be at least 1"),
        (1, 0, "a:2", "--ps 0: must be at least 1"),
        (2, 1, "a:1,b:1", "3 workers and servers are more than the 2 slots of a:1, b:1"),
    ],
)
def test_numbers_that_cannot_be(workers: int, servers: int, hosts: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        ServerPlan(program=PROGRAM, workers=workers, servers=servers, hosts=parse_hosts(hosts))


def test_the_slots_that_servers_leave_are_the_workers() -> None:
    assert number_of_workers(None, 1, parse_hosts("a:2,b:2")) == 3
    assert number_of_workers(2, 1, parse_hosts("a:2,b:2")) == 2
    for hosts in ("", "a:1"):
        with pytest.raises(UsageError, match=r"^the number of workers is missing: add --workers N"):
            number_of_workers(None, 1, parse_hosts(hosts) if hosts else ())


def test_a_job_has_room_for_what_was_asked() -> None:
    two = parse_hosts("a:1,b:1")
    assert roomy(two, 2) == two
    assert roomy(two, 5) == parse_hosts("a:3,b:3")


def with_gpus(folder: Path, count: int, **more: str) -> dict[str, str]:
    lines = "; ".join(
        f'echo "GPU {index}: NVIDIA H100 (UUID: GPU-{index})"' for index in range(count)
    )
    return {**path_with(folder, {"nvidia-smi": f"{lines or 'exit 9'}"}), **more}


@pytest.mark.parametrize(
    ("count", "chosen", "found"),
    [
        (2, None, ("0", "1")),
        (2, "1", ("1",)),
        (2, "", ()),
        (3, "GPU-2,0,-1,1", ("GPU-2", "0")),
        (1, "0,1,2", ("0",)),
        (2, "0,7,1", ("0",)),
        (2, "7", ()),
        (0, None, ()),
        (0, "0", ()),
    ],
)
def test_the_gpus_that_a_program_may_use(
    tmp_path: Path, count: int, chosen: str | None, found: tuple[str, ...]
) -> None:
    more = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(with_gpus(tmp_path, count, **more)) == found


def test_without_nvidias_program_there_is_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus(path_with(tmp_path, {}), tmp_path) == ()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(path_with(tmp_path, {}), tmp_path) == ("0", "1")


def test_where_a_tpu_is(tmp_path: Path) -> None:
    assert tpu_here({}, tmp_path) == ""
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    (tmp_path / "dev" / "vfio" / "vfio").touch()  # There also without any device.
    assert tpu_here({}, tmp_path) == ""
    (tmp_path / "dev" / "vfio" / "0").touch()
    assert tpu_here({}, tmp_path) == "/dev/vfio/0"
    (tmp_path / "dev" / "accel0").touch()
    assert tpu_here({}, tmp_path) == "/dev/accel0"
    assert tpu_here({"TPU_NAME": "mine"}, tmp_path) == "TPU_NAME=mine"


def test_central_storage_needs_two_gpus_or_a_number(tmp_path: Path) -> None:
    for count, words in ((0, "this one has none"), (1, "this one has one")):
        with pytest.raises(
            UsageError, match=f"^strategy central-storage needs .* {words}: use -np N"
        ):
            check_here("central-storage", None, with_gpus(tmp_path, count))
    check_here("central-storage", None, with_gpus(tmp_path, 2))
    check_here("central-storage", 2, with_gpus(tmp_path, 0))
    check_here("central-storage", None, with_gpus(tmp_path, 0, HVDTRAIN_REPLICAS="2"))


def test_tpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[check_here.__module__]
    monkeypatch.setattr(module, "tpu_here", lambda environ: "")
    with pytest.raises(UsageError, match=r"^strategy tpu needs a TPU, and this machine has none"):
        check_here("tpu", 8, {})
    monkeypatch.setattr(module, "tpu_here", lambda environ: "/dev/accel0")
    check_here("tpu", None, {})
