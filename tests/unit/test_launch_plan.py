"""A plan that cannot work is refused when it is made; one that can becomes exactly one command."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import EngineError, UsageError
from hvdtrain.launch.command import launch_command
from hvdtrain.launch.engine import built_controllers, choose_controller
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.variables import EnvVar

STARTER = (sys.executable, "-m", "hvdtrain.start.horovodrun")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.touch()
    return path


def plan_of(path: Path, **changes: Any) -> LaunchPlan:
    return LaunchPlan(**{"script": path, "np": 2, "controller": "gloo", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"np": 0}, "-np 0: "),
        ({"np": -3}, "-np -3: "),
        (
            {"np": 4, "hosts": (Host("a", 1), Host("b", 2))},
            "-np 4 is more than the 3 slots of a:1, b:2",
        ),
        ({"start_timeout": 0}, "--start-timeout 0"),
        ({"ssh_port": 65536}, "--ssh-port 65536"),
        ({"ssh_identity_file": Path("no/key")}, "no/key"),
        ({"stall_warning_seconds": 0}, "--stall-warning-seconds 0"),
        ({"stall_shutdown_seconds": -1}, "--stall-shutdown-seconds"),
        ({"stall_warning_seconds": 60, "stall_shutdown_seconds": 60}, "must be longer"),
        ({"script": Path("no/such.py")}, "no such script: no/such.py"),
        ({"script": Path("/")}, "/ is a folder"),
    ],
)
def test_plans_that_cannot_work(script: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan_of(script, **changes)
    assert message in str(error.value)


def test_stalls_may_be_left_alone(script: Path) -> None:
    assert plan_of(script, stall_shutdown_seconds=0).stall_shutdown_seconds == 0


def test_the_smallest_command(script: Path) -> None:
    argv = launch_command(plan_of(script), path="/bin", mpirun=None)
    assert argv == [
        *(*STARTER, "--", "-np", "2", "--gloo"),
        *("--stall-check-warning-time-seconds", "20", "--stall-check-shutdown-time-seconds", "50"),
        *(sys.executable, "-m", "hvdtrain.worker", str(script)),
    ]


def test_the_fullest_command(script: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    plan = plan_of(
        script,
        np=3,
        controller="mpi",
        arguments=("--epochs", "2", "a; rm -rf b"),
        hosts=(Host("a", 1), Host("b", 2)),
        python="/usr/bin/python3",
        start_timeout=60,
        network_interfaces=("eth0", "ib0"),
        ssh_port=2222,
        ssh_identity_file=key,
        stall_warning_seconds=5,
        stall_shutdown_seconds=0,
        env=(EnvVar("A", "1"), EnvVar("B"), EnvVar("C", "x y")),
        verbose=True,
    )
    assert launch_command(plan, path="/bin", mpirun="/bin/mpirun") == [
        *("env", "OMPI_MCA_mpi_yield_when_idle=1", "A=1", "C=x y", *STARTER),
        *("--env", "A", "--env", "B", "--env", "C", "--"),
        *("-np", "3", "--mpi", "--verbose", "-H", "a:1,b:2"),
        *("--network-interfaces", "eth0,ib0", "--start-timeout", "60"),
        *("--ssh-port", "2222", "--ssh-identity-file", str(key)),
        *("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "0"),
        *("/usr/bin/python3", "-m", "hvdtrain.worker", str(script), "--epochs", "2", "a; rm -rf b"),
    ]


def test_mpirun_is_found_without_activating_its_environment(script: Path) -> None:
    plan = plan_of(script, controller="mpi")
    mpirun = "/venv/bin/mpirun"
    outside = launch_command(plan, path="/usr/bin:/bin", mpirun=mpirun)
    inside = launch_command(plan, path="/venv/bin:/usr/bin", mpirun=mpirun)
    assert "PATH=/venv/bin:/usr/bin:/bin" in outside
    assert not any(part.startswith("PATH=") for part in inside)
    assert launch_command(plan_of(script), path="/usr/bin", mpirun=mpirun)[0] == sys.executable


def test_what_an_extension_was_built_with(tmp_path: Path) -> None:
    library = tmp_path / "mpi_lib.so"
    for content, built in [
        (b"..libmpi.so.40\0..N7horovod14GlooControllerE", {"mpi", "gloo"}),
        (b"..N7horovod14GlooControllerE..horovod_mpi_built", {"gloo"}),
        (b"..libmpi.so.40", {"mpi"}),
        (b"..", set()),
    ]:
        library.write_bytes(content)
        assert built_controllers(library) == built


def test_the_choice_of_a_controller() -> None:
    both, gloo, mpi = frozenset({"mpi", "gloo"}), frozenset({"gloo"}), frozenset({"mpi"})
    assert choose_controller("auto", both, "/bin/mpirun") == "mpi"
    assert choose_controller("auto", both, None) == "gloo"
    assert choose_controller("auto", gloo, "/bin/mpirun") == "gloo"
    assert choose_controller("gloo", both, "/bin/mpirun") == "gloo"
    with pytest.raises(UsageError, match=r"without the controller 'mpi' \(built: gloo\)"):
        choose_controller("mpi", gloo, "/bin/mpirun")
    with pytest.raises(UsageError, match="no mpirun in PATH"):
        choose_controller("mpi", both, None)
    with pytest.raises(EngineError, match="no mpirun in PATH"):
        choose_controller("auto", mpi, None)
