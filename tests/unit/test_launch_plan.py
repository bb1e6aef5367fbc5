"""A plan that cannot work is refused when it is made; one that can becomes exactly one command."""

import os
import pwd
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import EngineError, UsageError
from hvdtrain.launch.env_forwarding import EnvVar, parse_variable
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.installed_horovod import built_controllers, choose_controller
from hvdtrain.launch.launch_command import Site, this_site
from hvdtrain.launch.launchers.horovodrun import prepare
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program

STAND_IN = [sys.executable, "-P", "-m", "hvdtrain.start.run_horovod"]
SITE = Site({"PATH": "/bin"}, horovodrun="/venv/bin/horovodrun", mpirun="/bin/mpirun")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.touch()
    return path


def plan_of(path: Path, **changes: Any) -> LaunchPlan:
    return LaunchPlan(**{"program": Program(path), "np": 2, "controller": "gloo", **changes})


HOSTS = (Host("a", 2), Host("b", 2))


@pytest.fixture
def discovery(tmp_path: Path) -> Path:
    path = tmp_path / "discover.sh"
    path.touch(mode=0o755)
    return path


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
        ({"program": Program(Path("no/such.py"))}, "no such script: no/such.py"),
        ({"program": Program(Path("/"))}, "/ is a folder"),
    ],
)
def test_plans_that_cannot_work(script: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan_of(script, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Elastic.
        ({"min_np": 1, "hosts": HOSTS, "controller": "mpi"}, "works over Gloo only"),
        ({"max_np": 4, "hosts": HOSTS, "controller": "mpi"}, "works over Gloo only"),
        ({"min_np": 3, "hosts": HOSTS}, "--min-np 3 is more than -np 2"),
        ({"max_np": 1, "hosts": HOSTS}, "--max-np 1 is less than -np 2"),
        ({"max_np": 9, "hosts": HOSTS}, "--max-np 9 is more than the 4 slots of a:2, b:2"),
        ({"min_np": 0, "hosts": HOSTS}, "--min-np 0: must be at least 1"),
        ({"elastic_timeout": 9}, "--elastic-timeout has no effect here: add --host-discovery"),
        ({"reset_limit": 1, "hosts": HOSTS}, "--reset-limit has no effect here"),
        ({"blacklist_cooldown_range": (1, 2)}, "--blacklist-cooldown-range has no effect here"),
        (
            {"min_np": 1, "hosts": HOSTS, "blacklist_cooldown_range": (0, 2)},
            "range 0: must be at least 1",
        ),
        ({"min_np": 1, "hosts": HOSTS, "blacklist_cooldown_range": (1, 3601)}, "from 1 to 3600"),
        ({"min_np": 1, "hosts": HOSTS, "blacklist_cooldown_range": (9, 5)}, "the shorter time"),
        ({"slots_per_host": 2, "min_np": 1, "hosts": HOSTS}, "--slots-per-host has no effect"),
        ({"host_discovery_script": Path("no/where")}, "no such file: no/where"),
        ({"host_discovery_script": Path(__file__)}, "cannot be executed: chmod +x"),
        # What works with another option only.
        *(
            ({name: value}, f"--{name.replace('_', '-')} has no effect here: add --autotune")
            for name, value in {
                "autotune_log_file": Path("log"),
                "autotune_warmup_samples": 0,
                "autotune_steps_per_sample": 1,
                "autotune_bayes_opt_max_samples": 1,
                "autotune_gaussian_process_noise": 0.0,
            }.items()
        ),
        ({"autotune": False, "autotune_warmup_samples": 1}, "has no effect here: add --autotune"),
        ({"timeline_mark_cycles": True}, "has no effect here: add --timeline-filename"),
        ({"gloo_timeout_seconds": 9, "controller": "mpi"}, "add --controller gloo"),
        ({"mpi_args": "-v"}, "--mpi-args has no effect here: add --controller mpi"),
        ({"binding_args": "-v"}, "--binding-args has no effect here: add --controller mpi"),
        ({"mpi_threads_disable": True}, "add --controller mpi"),
        ({"hierarchical_allreduce": True, "hosts": HOSTS}, "add --controller mpi"),
        ({"hierarchical_allgather": True, "controller": "mpi"}, "name several hosts"),
        ({"torus_allreduce": True}, "name several hosts"),
        ({"thread_affinity": 0}, "--env HOROVOD_THREAD_AFFINITY=0,1"),
        ({"thread_affinity": 0, "hosts": HOSTS}, "--env HOROVOD_THREAD_AFFINITY=0,1"),
        *(
            (
                {name: value, "launcher": "srun", "controller": "mpi"},
                "another launcher starts the workers",
            )
            for name, value in {
                "output_filename": Path("o"),
                "disable_cache": True,
                "ssh_port": 22,
                "ssh_identity_file": Path(__file__),
                "mpi_args": "-v",
                "binding_args": "-v",
            }.items()
        ),
        # What excludes another.
        (
            {
                "torus_allreduce": True,
                "hierarchical_allreduce": True,
                "hosts": HOSTS,
                "controller": "mpi",
            },
            "--hierarchical-allreduce and --torus-allreduce do the same thing",
        ),
        ({"env": (EnvVar("A"), EnvVar("A", "1"))}, "--env A appears twice"),
        # Bounds.
        ({"cycle_time_ms": float("nan")}, "--cycle-time-ms nan: must be a finite number"),
        ({"fusion_threshold_mb": -1}, "--fusion-threshold-mb -1: must be at least 0"),
        ({"autotune": True, "autotune_gaussian_process_noise": 1.5}, "a number from 0 to 1"),
        ({"num_nccl_streams": 0}, "--num-nccl-streams 0"),
        ({"gloo_timeout_seconds": 0}, "--gloo-timeout-seconds 0: must be at least 1 second"),
        ({"output_filename": Path(__file__)}, "is a file: pass a folder"),
        ({"output_filename": Path("/dev/null/logs")}, "--output-filename: cannot write to the"),
        ({"timeline_filename": Path("/nowhere/t.json")}, "cannot write to the folder /nowhere"),
        ({"timeline_filename": Path("/tmp")}, "--timeline-filename: /tmp is a folder: pass a file"),
        ({"autotune": True, "autotune_log_file": Path("/nowhere/a")}, "folder /nowhere"),
        # What would reach a shell.
        (
            {"mpi_args": "-x A; rm -rf b", "controller": "mpi"},
            "the shell would interpret ';'",
        ),
        (
            {"binding_args": "$(id)", "controller": "mpi"},
            "the shell would interpret '$' '(' ')'",
        ),
        ({"mpi_args": "-v\n-w", "controller": "mpi"}, "the shell would interpret"),
        ({"mpi_args": "-x 'A", "controller": "mpi"}, "no closing quotation"),
        ({"network_interfaces": ("eth0;id",)}, "'eth0;id' is not the name of an interface"),
        ({"network_interfaces": ("",)}, "'' is not the name of an interface"),
        ({"network_interfaces": ("-x",)}, "'-x' is not the name of an interface"),
    ],
)
def test_options_that_do_not_go_together(
    script: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        plan_of(script, **changes)
    assert message in str(error.value)


def test_two_ways_to_name_the_hosts(script: Path, discovery: Path) -> None:
    with pytest.raises(UsageError, match="--hosts and --host-discovery-script both name the hosts"):
        plan_of(script, hosts=HOSTS, host_discovery_script=discovery)
    assert plan_of(script, host_discovery_script=discovery, slots_per_host=2).elastic


def test_paths_that_horovod_gives_to_a_shell(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("my key", "key;id", "$key", "key`id`"):
        key = tmp_path / name
        key.touch()
        with pytest.raises(UsageError, match="move the key"):
            plan_of(script, ssh_identity_file=key)
    folder = tmp_path / "my experiments"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="the working folder is"):
        plan_of(script, hosts=HOSTS)
    assert plan_of(script, hosts=(Host("localhost", 2),)).np == 2
    assert plan_of(script, hosts=HOSTS, controller="mpi").np == 2
    assert plan_of(script, hosts=HOSTS, launcher="srun").np == 2, "srun uses no shell"
    assert plan_of(script, hosts=(Host(os.uname().nodename, 2),)).np == 2


def test_one_core_for_horovods_thread_needs_one_worker_a_host(script: Path) -> None:
    hosts = (Host("a", 1), Host("b", 4))
    assert plan_of(script, thread_affinity=0, hosts=hosts).thread_affinity == 0
    with pytest.raises(UsageError):
        plan_of(script, thread_affinity=0, hosts=hosts, np=3)


@pytest.mark.parametrize(
    "name", ["", "A B", "1A", "A-B", "A;B", "HOROVOD_RANK", "HOROVOD_GLOO_IFACE", "PMI_RANK"]
)
def test_names_that_no_variable_can_have(name: str) -> None:
    with pytest.raises(UsageError):
        EnvVar(name, "x")


def test_variables_are_read_and_not_shown() -> None:
    assert parse_variable("A=b=c") == EnvVar("A", "b=c")
    assert parse_variable("A=") == EnvVar("A", "")
    assert parse_variable("A") == EnvVar("A", None)
    assert "hush" not in repr(EnvVar("A", "hush"))


def test_stalls_may_be_left_alone(script: Path) -> None:
    assert plan_of(script, stall_shutdown_seconds=0).stall_shutdown_seconds == 0


def test_the_smallest_command(script: Path) -> None:
    launch = prepare(plan_of(script), SITE)
    assert launch.typed == [
        *("/venv/bin/horovodrun", "-np", "2", "--gloo"),
        *("--stall-check-warning-time-seconds", "20", "--stall-check-shutdown-time-seconds", "50"),
        *(sys.executable, "-P", "-m", "hvdtrain.worker", str(script)),
    ]
    assert launch.argv == [*STAND_IN, *launch.typed[1:]]
    assert launch.environment({"A": "1"}) == {"A": "1", "PYTHONHASHSEED": "0"}
    users = Site({"PYTHONHASHSEED": "7"})
    assert prepare(plan_of(script), users).environment(users.environ) == users.environ


def test_the_fullest_command(script: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    plan = plan_of(
        script,
        np=3,
        controller="mpi",
        program=Program(script, ("--epochs", "2", "a; rm -rf b"), python="/usr/bin/python3"),
        hosts=(Host("a", 1), Host("b", 2)),
        start_timeout=60,
        network_interfaces=("eth0", "ib0"),
        ssh_port=2222,
        ssh_identity_file=key,
        stall_warning_seconds=5,
        stall_shutdown_seconds=0,
        env=(EnvVar("A", "1"), EnvVar("B"), EnvVar("C", "x y")),
        verbose=True,
    )
    launch = prepare(plan, SITE)
    assert launch.typed == [
        *("env", "OMPI_MCA_mpi_yield_when_idle=1", "A=1", "C=x y", "/venv/bin/horovodrun"),
        *("-np", "3", "--mpi", "--verbose", "-H", "a:1,b:2"),
        *("--network-interfaces", "eth0,ib0", "--start-timeout", "60"),
        *("--ssh-port", "2222", "--ssh-identity-file", str(key)),
        *("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "0"),
        *(
            "/usr/bin/python3",
            "-P",
            "-m",
            "hvdtrain.worker",
            str(script),
            "--epochs",
            "2",
            "a; rm -rf b",
        ),
    ]
    # No value stands in the command line of what runs.
    assert launch.argv == [*STAND_IN, *launch.typed[5:]]
    assert launch.environment({"B": "hush", "C": "old"}) == {
        **{"A": "1", "B": "hush", "C": "x y", "OMPI_MCA_mpi_yield_when_idle": "1"},
        **{"HVDTRAIN_FORWARD": "A,B,C", "PYTHONHASHSEED": "0"},
    }


def test_mpirun_is_found_without_activating_its_environment(script: Path) -> None:
    plan = plan_of(script, controller="mpi")
    mpirun = "/venv/bin/mpirun"
    outside = prepare(plan, Site({"PATH": "/usr/bin:/bin"}, mpirun=mpirun))
    inside = prepare(plan, Site({"PATH": "/venv/bin:/usr/bin"}, mpirun=mpirun))
    assert outside.settings["PATH"] == "/venv/bin:/usr/bin:/bin"
    assert "PATH" not in inside.settings
    assert not prepare(plan_of(script), Site({}, mpirun=mpirun)).settings


def test_mpirun_is_given_a_home(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without HOME it crashes, where the user id has no entry in /etc/passwd."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not this_site().home
    monkeypatch.delenv("HOME")
    assert this_site().home == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    site = this_site()
    assert site.home == tempfile.gettempdir()
    assert prepare(plan_of(script, controller="mpi"), site).settings["HOME"] == site.home
    assert "HOME" not in prepare(plan_of(script, controller="gloo"), site).settings


def test_mpirun_is_found_on_other_hosts(script: Path) -> None:
    """ssh starts with a bare PATH there, under a pasted command as well."""
    site = replace(SITE, mpi_prefix="/opt/my mpi", names=SITE.names | {"a"})
    for changes, words in (
        ({"hosts": HOSTS}, ["--mpi-args=--prefix '/opt/my mpi'"]),
        ({"hosts": HOSTS, "mpi_args": "-v"}, ["--mpi-args=-v --prefix '/opt/my mpi'"]),
        ({"hosts": HOSTS, "mpi_args": "--prefix /x"}, ["--mpi-args=--prefix /x"]),
        ({"hosts": (Host("a", 2),)}, []),
        ({}, []),
    ):
        launch = prepare(plan_of(script, controller="mpi", **changes), site)
        assert [word for word in launch.words if word.startswith("--mpi-args")] == words
    assert "--prefix" not in str(prepare(plan_of(script, hosts=HOSTS), site).words)


def test_what_a_pasted_command_lacks_is_said(script: Path) -> None:
    assert prepare(plan_of(script), SITE).notes == ()
    assert prepare(plan_of(script, hosts=HOSTS, controller="mpi"), SITE).notes == ()
    (line,) = prepare(plan_of(script, hosts=HOSTS), SITE).notes
    assert line.startswith(
        "when pasted, horovodrun --gloo puts all variables of your shell into command"
    )


@pytest.mark.parametrize("name", ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"])
@pytest.mark.parametrize("exported", ["gloo", "MPI", "mpi"])
def test_what_was_exported_for_another_launch_is_taken_away(
    script: Path, name: str, exported: str
) -> None:
    """Ranks that mpirun starts would wait for Gloo's rendezvous, or crash."""
    site = Site({name: exported, "HVDTRAIN_STRATEGY": "tpu", "A": "b"})
    launch = prepare(plan_of(script, controller="mpi"), site)
    words = ["env", "-u", name] if exported == "gloo" else ["env"]
    assert launch.typed[: len(words)] == words
    assert "HVDTRAIN_STRATEGY=horovod" in launch.typed
    left = launch.environment(site.environ)
    assert left.get(name) == (None if exported == "gloo" else exported)
    assert left["A"] == "b"


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
