"""Each option against horovodrun itself: our argv is read by horovodrun's own parser, and what it
takes from it, and puts into the ranks' environment, is what the plan says."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from horovod.runner import launch as horovod_launch
from horovod.runner.common.util import config_parser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.launch.hosts import Host
from hvdtrain.launch.launchers.horovodrun import horovodrun_options
from hvdtrain.launch.option_types import GROUPS, options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program

TWO_HOSTS = (Host("a", 2), Host("b", 2))
STALL = ("--stall-check-warning-time-seconds", "20", "--stall-check-shutdown-time-seconds", "50")
# Options of horovodrun that no field of the plan gives, and why.
LEFT_OUT = {
    "--help": "hvdtrain has its own",
    "--version": "hvdtrain --version",
    "--check-build": "hvdtrain doctor",
    "--jsrun": "broken in horovodrun 0.28.1",
    "--hostfile": "read by hvdtrain and given as -H",
    "--config-file": "read by hvdtrain",
    "--prefix-output-with-timestamp": "hvdtrain does it, for all launchers alike",
    "--network-interface": "deprecated",
    "--log-hide-timestamp": "deprecated",
    "--no-log-hide-timestamp": "deprecated",
    "--stall-check": "horovodrun's default",
}
SPOKEN_BY_CONTROLLER = {"--gloo", "--mpi"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script, a key and a discovery script."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "key", "discover it.sh"):
        (tmp_path / name).touch(mode=0o755)
    return tmp_path


def plan_of(**changes: Any) -> LaunchPlan:
    return LaunchPlan(
        **{"program": Program(Path("train.py")), "np": 4, "controller": "gloo", **changes}
    )


def horovodrun_reads(options: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["horovodrun", *options, "python", "-x", "--mpi"])
    return horovod_launch.parse_args()


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    return config_parser.set_env_from_args({}, args)


MPI = {"controller": "mpi"}
ELASTIC = {"min_np": 2, "hosts": TWO_HOSTS}
AUTOTUNE = {"autotune": True}
TIMELINE = {"timeline_filename": Path("t.json")}
MANY = {"hosts": TWO_HOSTS}
# (options of the plan that it needs, the option, its words, what horovodrun's parser makes of them)
EACH: list[tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any]]] = [
    ({}, {"np": 3}, ["-np", "3"], {"num_proc": 3}),
    ({}, {"controller": "gloo"}, ["--gloo"], {"use_gloo": True, "use_mpi": False}),
    ({}, MPI, ["--mpi"], {"use_gloo": False, "use_mpi": True}),
    ({}, {"verbose": True}, ["--verbose"], {"verbose": True}),
    ({}, {"disable_cache": True}, ["--disable-cache"], {"disable_cache": True}),
    (
        {},
        {"output_filename": Path("o u t")},
        ["--output-filename", "o u t"],
        {"output_filename": "o u t"},
    ),
    # Goes through a shell.
    (
        MPI,
        {"output_filename": Path("o u t")},
        ["--output-filename", "'o u t'"],
        {"output_filename": "'o u t'"},
    ),
    (
        {},
        {"output_filename": Path("-o")},
        ["--output-filename=-o"],
        {"output_filename": "-o"},
    ),
    ({}, MANY, ["-H", "a:2,b:2"], {"hosts": "a:2,b:2"}),
    (
        {},
        {"network_interfaces": ("eth0", "ib0")},
        ["--network-interfaces", "eth0,ib0"],
        {"nics": {"eth0", "ib0"}},
    ),
    ({}, {"start_timeout": 90}, ["--start-timeout", "90"], {"start_timeout": 90}),
    ({}, {"ssh_port": 2222}, ["--ssh-port", "2222"], {"ssh_port": 2222}),
    (
        {},
        {"ssh_identity_file": Path("key")},
        ["--ssh-identity-file", "key"],
        {"ssh_identity_file": "key"},
    ),
    (ELASTIC, {"min_np": 3}, ["--min-np", "3"], {"min_num_proc": 3}),
    # horovodrun takes --max-np alone for a job that is not elastic.
    (MANY, {"max_np": 4}, ["--min-np", "4", "--max-np", "4"], {"min_num_proc": 4, "max_num_proc": 4}),
    (ELASTIC, {"elastic_timeout": 60}, ["--elastic-timeout", "60"], {"elastic_timeout": 60}),
    (ELASTIC, {"reset_limit": 3}, ["--reset-limit", "3"], {"reset_limit": 3}),
    (
        ELASTIC,
        {"blacklist_cooldown_range": (10, 3600)},
        ["--blacklist-cooldown-range", "10", "3600"],
        {"cooldown_range": [10, 3600]},
    ),
    ({}, {"fusion_threshold_mb": 0}, ["--fusion-threshold-mb", "0"], {"fusion_threshold_mb": 0}),
    ({}, {"cycle_time_ms": 0.5}, ["--cycle-time-ms", "0.5"], {"cycle_time_ms": 0.5}),
    ({}, {"cache_capacity": 9}, ["--cache-capacity", "9"], {"cache_capacity": 9}),
    *(
        (needs, {field: value}, [f"--{off}{flag}"], {field: value})
        for needs, field, flag in [
            ({**MPI, **MANY}, "hierarchical_allreduce", "hierarchical-allreduce"),
            ({**MPI, **MANY}, "hierarchical_allgather", "hierarchical-allgather"),
            (MANY, "torus_allreduce", "torus-allreduce"),
            ({}, "autotune", "autotune"),
            (TIMELINE, "timeline_mark_cycles", "timeline-mark-cycles"),
            (MPI, "mpi_threads_disable", "mpi-threads-disable"),
        ]
        for value, off in [(True, ""), (False, "no-")]
    ),
    (
        AUTOTUNE,
        {"autotune_log_file": Path("log.csv")},
        ["--autotune-log-file", "log.csv"],
        {"autotune_log_file": "log.csv"},
    ),
    (AUTOTUNE, {"autotune_warmup_samples": 0}, ["--autotune-warmup-samples", "0"],
     {"autotune_warmup_samples": 0}),
    (AUTOTUNE, {"autotune_steps_per_sample": 5}, ["--autotune-steps-per-sample", "5"],
     {"autotune_steps_per_sample": 5}),
    (AUTOTUNE, {"autotune_bayes_opt_max_samples": 7}, ["--autotune-bayes-opt-max-samples", "7"],
     {"autotune_bayes_opt_max_samples": 7}),
    (AUTOTUNE, {"autotune_gaussian_process_noise": 0.25},
     ["--autotune-gaussian-process-noise", "0.25"], {"autotune_gaussian_process_noise": 0.25}),
    ({}, TIMELINE, ["--timeline-filename", "t.json"], {"timeline_filename": "t.json"}),
    ({}, {"stall_check": False}, ["--no-stall-check"], {"no_stall_check": True}),
    ({}, {"stall_warning_seconds": 5}, ["--stall-check-warning-time-seconds", "5"],
     {"stall_check_warning_time_seconds": 5}),
    ({}, {"stall_shutdown_seconds": 0}, ["--stall-check-shutdown-time-seconds", "0"],
     {"stall_check_shutdown_time_seconds": 0}),
    ({}, {"gloo_timeout_seconds": 60}, ["--gloo-timeout-seconds", "60"],
     {"gloo_timeout_seconds": 60}),
    # Both are words of a line for a shell.
    (MPI, {"mpi_args": "-mca btl ^openib -x 'A=b c'"}, ["--mpi-args=-mca btl '^openib' -x 'A=b c'"],
     {"mpi_args": "-mca btl '^openib' -x 'A=b c'"}),
    (MPI, {"binding_args": "-bind-to core"}, ["--binding-args=-bind-to core"],
     {"binding_args": "-bind-to core"}),
    ({}, {"tcp": True}, ["--tcp"], {"tcp_flag": True}),
    ({}, {"num_nccl_streams": 2}, ["--num-nccl-streams", "2"], {"num_nccl_streams": 2}),
    ({"np": 1}, {"thread_affinity": 0}, ["--thread-affinity", "0"], {"thread_affinity": 0}),
    ({}, {"log_level": "TRACE"}, ["--log-level", "TRACE"], {"log_level": "TRACE"}),
    ({}, {"log_with_timestamp": True}, ["--log-with-timestamp"], {"log_with_timestamp": True}),
    ({}, {"log_with_timestamp": False}, ["--log-without-timestamp"], {"log_with_timestamp": False}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "option", "words", "read"), EACH, ids=lambda value: "-".join(map(str, value)) or "-"
)
def test_each_option(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    needs: dict[str, Any],
    option: dict[str, Any],
    words: list[str],
    read: dict[str, Any],
) -> None:
    options = horovodrun_options(plan_of(**{**needs, **option}))
    assert any(options[i : i + len(words)] == words for i in range(len(options)))
    args = horovodrun_reads(options, monkeypatch)
    assert {name: getattr(args, name) for name in read} == read
    assert args.command == ["python", "-x", "--mpi"]


def test_each_field_has_its_case() -> None:
    elsewhere = {"env", "launcher", "host_discovery_script", "slots_per_host"}
    cases = {field for _, option, _, _ in EACH for field in option}
    assert cases == {option.field for option in options_of(LaunchPlan)} - elsewhere


def test_a_discovery_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slots, expected in ((None, 1), (4, 4)):
        plan = plan_of(host_discovery_script=Path("discover it.sh"), slots_per_host=slots)
        args = horovodrun_reads(horovodrun_options(plan), monkeypatch)
        # Horovod gives the text to a shell.
        assert shlex.split(args.host_discovery_script) == [str(folder / "discover it.sh")]
        assert (args.slots, args.min_num_proc, args.hosts) == (expected, 4, None)


@pytest.mark.usefixtures("folder")
def test_a_host_on_which_a_rank_failed_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's own default is never."""
    read = horovodrun_reads(horovodrun_options(plan_of(**ELASTIC)), monkeypatch)
    assert read.cooldown_range == [10, 300]
    read = horovodrun_reads(horovodrun_options(plan_of(**MANY)), monkeypatch)
    assert read.cooldown_range is None


def test_what_is_not_asked_for_is_left_to_horovod(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = horovodrun_options(plan_of())
    assert options == ["-np", "4", "--gloo", *STALL]
    assert horovodrun_options(plan_of(stall_check=False)) == [
        "-np",
        "4",
        "--gloo",
        "--no-stall-check",
    ]
    assert environment_of(horovodrun_reads(options, monkeypatch)) == {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "50",
    }


def test_the_time_to_start_grows_with_the_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(hosts: int, **changes: Any) -> int | None:
        plan = plan_of(np=1, hosts=tuple(Host(f"h{i}", 1) for i in range(hosts)), **changes)
        return horovodrun_reads(horovodrun_options(plan), monkeypatch).start_timeout

    assert [seconds(0), seconds(1), seconds(2), seconds(64)] == [None, None, 32, 156]
    assert seconds(64, start_timeout=20) == 20


def test_every_option_of_horovodrun_is_covered_or_left_out_for_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser) -> None:
        parsers.append(parser)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(SystemExit):
        horovod_launch.parse_args()
    theirs = [set(action.option_strings) for action in parsers[0]._actions if action.option_strings]
    ours = {
        flag for option in options_of(LaunchPlan) for flag in (option.flag, option.off) if flag
    } | SPOKEN_BY_CONTROLLER
    assert ours <= set.union(*theirs)
    unknown = [names for names in theirs if not names & (ours | LEFT_OUT.keys())]
    assert unknown == []
    assert not ours & LEFT_OUT.keys()


# Values that a plan accepts whatever the others are, with those that need them.
KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "fusion_threshold_mb": st.integers(0, 4096),
        "cycle_time_ms": st.floats(0, 1000, allow_nan=False),
        "cache_capacity": st.integers(0, 10**6),
        "hierarchical_allreduce": st.booleans(),
        "hierarchical_allgather": st.booleans(),
        "torus_allreduce": st.just(False),
        "timeline_filename": st.sampled_from([Path("t.json"), Path("a b/t.json"), Path("-t")]),
        "stall_check": st.booleans(),
        "stall_warning_seconds": st.integers(1, 49),
        "stall_shutdown_seconds": st.one_of(st.just(0), st.integers(50, 10**5)),
        "mpi_threads_disable": st.booleans(),
        "tcp": st.booleans(),
        "num_nccl_streams": st.integers(1, 8),
        "log_level": st.sampled_from(["TRACE", "FATAL"]),
        "log_with_timestamp": st.booleans(),
    },
)
TUNED = st.fixed_dictionaries(
    {"autotune": st.just(True)},
    optional={
        "autotune_log_file": st.just(Path("log.csv")),
        "autotune_warmup_samples": st.integers(0, 99),
        "autotune_gaussian_process_noise": st.floats(0, 1),
    },
)


SAME_NAME = {
    *("cache_capacity", "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
    *("mpi_threads_disable", "num_nccl_streams", "log_level"),
}
OTHER_NAME = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "timeline_filename": "HOROVOD_TIMELINE",
    "tcp": "NCCL_IB_DISABLE",
    "stall_warning_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}


def meant_for_the_ranks(plan: LaunchPlan) -> dict[str, str]:
    """The variables of Horovod's core that say what the plan says."""
    names = {field: f"HOROVOD_{field.upper()}" for field in SAME_NAME} | OTHER_NAME
    found = {variable: getattr(plan, field) for field, variable in names.items()}
    found["NCCL_IB_DISABLE"] = plan.tcp or None
    if plan.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = plan.fusion_threshold_mb * 2**20
    if plan.log_with_timestamp is not None:
        found["HOROVOD_LOG_HIDE_TIME"] = not plan.log_with_timestamp
    if not plan.stall_check:
        found["HOROVOD_STALL_CHECK_DISABLE"] = True
        del found["HOROVOD_STALL_CHECK_TIME_SECONDS"], found["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    if plan.autotune:
        found |= {
            "HOROVOD_AUTOTUNE": True,
            "HOROVOD_AUTOTUNE_LOG": plan.autotune_log_file,
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": plan.autotune_warmup_samples,
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": plan.autotune_gaussian_process_noise,
        }
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in found.items()
        if value is not None
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(knobs=KNOBS, tuned=st.one_of(st.just({}), st.just({"autotune": False}), TUNED))
def test_what_the_ranks_get_in_their_environment(
    folder: Path, knobs: dict[str, Any], tuned: dict[str, Any]
) -> None:
    plan = plan_of(controller="mpi", hosts=TWO_HOSTS, **knobs, **tuned)
    with pytest.MonkeyPatch.context() as patch:
        args = horovodrun_reads(horovodrun_options(plan), patch)
    assert environment_of(args) == meant_for_the_ranks(plan)


def test_groups_are_those_of_the_help() -> None:
    of_plan = {option.group for option in options_of(LaunchPlan)}
    assert of_plan | {"strategy", "adopt", "about"} == set(GROUPS)
