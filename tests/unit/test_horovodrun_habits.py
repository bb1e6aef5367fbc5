"""Whoever knows horovodrun types `hvdtrain run` in its place, and gets the same ranks, hosts and environment.

horovodrun's own parser reads the line as it was typed, and reads the one that `hvdtrain run --dry-run` prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from horovod.runner import launch as horovod_launch
from horovod.runner.common.util import config_parser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.cli.command_table import main
from hvdtrain.environment import STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.launch.autotuning import FOLDER

# The command lines of Horovod's documentation, by its page.
DOCUMENTED = """
running     horovodrun -np 4 -H localhost:4 python train.py
running     horovodrun -np 16 -H server1:4,server2:4,server3:4,server4:4 python train.py
running     horovodrun -np 6 -hostfile myhostfile python train.py
mpi         horovodrun -np 4 python train.py
gloo        horovodrun --gloo -np 2 python train.py
gloo        horovodrun --gloo -np 2 -H localhost:2 python train.py
autotune    horovodrun -np 4 --autotune python train.py
autotune    horovodrun -np 4 --autotune --autotune-log-file /tmp/autotune_log.csv python train.py
autotune    horovodrun -np 4 --autotune --cache-capacity 1024 --no-hierarchical-allgather python train.py
autotune    horovodrun -np 4 --autotune --autotune-warmup-samples 5 --autotune-steps-per-sample 20 \
--autotune-bayes-opt-max-samples 40 python train.py
autotune    horovodrun -np 4 --autotune --autotune-gaussian-process-noise 0.75 python train.py
timeline    horovodrun -np 4 --timeline-filename /path/to/timeline.json python train.py
timeline    horovodrun -np 4 --timeline-filename /path/to/timeline.json --timeline-mark-cycles python train.py
timeline    HOROVOD_TIMELINE=/path/to/timeline.json HOROVOD_TIMELINE_MARK_CYCLES=1 horovodrun -np 4 python train.py
fusion      horovodrun -np 4 --fusion-threshold-mb 32 python train.py
fusion      horovodrun -np 4 --fusion-threshold-mb 0 python train.py
fusion      horovodrun -np 4 --cycle-time-ms 3.5 python train.py
fusion      HOROVOD_FUSION_THRESHOLD=33554432 horovodrun -np 4 python train.py
fusion      HOROVOD_CYCLE_TIME=3.5 horovodrun -np 4 python train.py
elastic     horovodrun -np 8 --host-discovery-script discover_hosts.sh python train.py
elastic     horovodrun -np 8 --host-discovery-script discover_hosts.sh --slots 4 python train.py
elastic     horovodrun -np 8 --min-np 4 --max-np 12 --host-discovery-script discover_hosts.sh python train.py
docker      horovodrun -np 16 -H host1:4,host2:4,host3:4,host4:4 -p 12345 python train.py
docker      horovodrun -np 8 -H host1:4,host2:4 python train.py
--help      horovodrun -np 8 -H host1:4,host2:4 --network-interfaces "eth0,eth1" --gloo python train.py
--help      horovodrun -np 8 -H host1:4,host2:4 --network-interface eth0 --network-interface eth1 python train.py
--help      horovodrun -np 2 --mpi --mpi-args="--map-by ppr:6:node" python train.py
--help      horovodrun -np 2 --mpi --binding-args="--rankfile myrankfile" python train.py
--help      horovodrun -np 8 --host-discovery-script discover_hosts.sh --blacklist-cooldown-range 60 300 \
python train.py
"""
LINES = [line.split(maxsplit=1)[1] for line in DOCUMENTED.strip().splitlines()]
# Said to horovodrun always, so that no run waits for ever: Horovod's own are 60, and never.
OURS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_WARNING_SECONDS),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN_SECONDS),
}
FIELDS = (
    *("num_proc", "min_num_proc", "max_num_proc", "reset_limit", "elastic_timeout"),
    *("cooldown_range", "ssh_port", "ssh_identity_file", "nics", "mpi_args", "binding_args"),
    *("tcp_flag", "disable_cache", "start_timeout", "verbose", "output_filename"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with what the lines name."""
    path = tmp_path_factory.mktemp("work")
    for name in ("train.py", "discover_hosts.sh", "key"):
        (path / name).touch(mode=0o755)
    (path / "myhostfile").write_text("aa slots=2\nbb slots=2\ncc slots=2\n")
    with contextlib.chdir(path):
        yield path


def horovodrun_reads(words: list[str]) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["horovodrun", *words])
        with contextlib.redirect_stderr(io.StringIO()):
            return horovod_launch.parse_args()


def meaning(args: argparse.Namespace, exported: dict[str, str]) -> dict[str, object]:
    """What a line asks for: the environment of the ranks, and all else in Horovod's words."""
    hosts = args.hosts
    if args.hostfile:
        lines = Path(args.hostfile).read_text().splitlines()
        hosts = ",".join(line.replace(" slots=", ":") for line in lines)
    found = {name: getattr(args, name) for name in FIELDS}
    if args.host_discovery_script or args.min_num_proc:
        # What horovodrun goes by without them.
        found["min_num_proc"] = args.min_num_proc or args.num_proc
        found["slots"] = args.slots or 1
    script = args.host_discovery_script
    return found | {
        "hosts": hosts,
        "nics": sorted(args.nics or ()),
        "discovery": str(Path(shlex.split(script)[0]).absolute()) if script else None,
        "environment": {**OURS, **config_parser.set_env_from_args(dict(exported), args)},
    }


def printed(words: list[str], exported: dict[str, str]) -> tuple[list[str], dict[str, str], str]:
    """What `hvdtrain run --dry-run` prints: horovodrun's words, the variables set for it, and what is said."""
    environ: dict[str, str | None] = {n: None for n in os.environ if n.startswith("HOROVOD_")}
    result = CliRunner().invoke(main, ["run", "--dry-run", *words], env=environ | exported)
    assert result.exit_code == 0, result.output
    line = shlex.split(result.stdout)
    at = next(index for index, word in enumerate(line) if Path(word).name == "horovodrun")
    assigned = dict(word.split("=", 1) for word in line[:at] if "=" in word)
    return line[at + 1 :], exported | assigned, result.stderr


def same(words: list[str], exported: dict[str, str]) -> None:
    typed = horovodrun_reads(words)
    ours, environ, _ = printed(words, exported)
    passed = horovodrun_reads(ours)
    if typed.start_timeout is None:
        passed.start_timeout = None  # Longer here the more hosts there are.
    if typed.cooldown_range is None and passed.cooldown_range == [10, 300]:
        passed.cooldown_range = None  # Here a host on which a rank failed is used again.
    if passed.autotune_log_file and Path(passed.autotune_log_file).parent == FOLDER:
        passed.autotune_log_file = None  # Here what was found is kept for the next run.
    if passed.mpi_args:  # Where mpirun is on other hosts is said as well.
        passed.mpi_args = re.sub(r" ?--prefix \S+$", "", passed.mpi_args) or None
    assert passed.command[-1] == typed.command[-1] == "train.py"
    chosen = typed.use_gloo or typed.use_mpi
    if chosen:
        assert (passed.use_gloo, passed.use_mpi) == (typed.use_gloo, typed.use_mpi)
    given = {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}
    assert meaning(passed, given) == meaning(typed, exported)


@pytest.mark.parametrize("line", LINES)
def test_documented_lines(folder: Path, line: str) -> None:
    words = shlex.split(line.replace("/path/to", str(folder)))  # A folder that is there.
    at = words.index("horovodrun")
    same(words[at + 1 :], dict(word.split("=", 1) for word in words[:at]))


def value(name: str, kind: st.SearchStrategy[object]) -> st.SearchStrategy[list[str]]:
    return kind.map(lambda one: [name, str(one)])


def flag(*names: str) -> st.SearchStrategy[list[str]]:
    return st.sampled_from(names).map(lambda name: [name])


# Each is of one kind of horovodrun's, which takes one of its spellings.
HOSTS = st.one_of(
    st.just(["-H", "a:2,b:2"]), st.just(["--hosts", "a:3,b:1"]), st.just(["-hostfile", "myhostfile"]),
    st.just(["--hostfile", "myhostfile"]),
)  # fmt: skip
OPTIONS = [
    value("--fusion-threshold-mb", st.integers(0, 1024)),
    value("--cycle-time-ms", st.floats(0, 100, allow_nan=False)),
    value("--cache-capacity", st.integers(0, 9999)),
    flag("--no-hierarchical-allreduce", "--hierarchical-allreduce"),
    flag("--no-hierarchical-allgather", "--hierarchical-allgather"),
    flag("--no-torus-allreduce"),
    st.sampled_from(["--no-autotune", "--autotune", "--autotune --autotune-log-file log.csv",
                     "--autotune --autotune-warmup-samples 0 --autotune-gaussian-process-noise 0.25",
                     "--autotune --autotune-steps-per-sample 7 --autotune-bayes-opt-max-samples 9"]).map(str.split),
    st.sampled_from(["--timeline-filename t.json", "--timeline-filename t.json --timeline-mark-cycles",
                     "--timeline-filename t.json --no-timeline-mark-cycles"]).map(str.split),
    st.tuples(st.integers(1, 99), st.one_of(st.just(0), st.integers(100, 999))).map(
        lambda two: ["--stall-check-warning-time-seconds", str(two[0]),
                     "--stall-check-shutdown-time-seconds", str(two[1])]),
    flag("--mpi-threads-disable", "--no-mpi-threads-disable"),
    value("--num-nccl-streams", st.integers(1, 8)),
    flag("--tcp"),
    flag("--disable-cache"),
    flag("--verbose"),
    value("--start-timeout", st.integers(1, 999)),
    st.one_of(value("-p", st.integers(1, 65535)), value("--ssh-port", st.integers(1, 65535))),
    st.sampled_from([["-i", "key"], ["--ssh-identity-file", "key"]]),
    value("--log-level", st.sampled_from(["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"])),
    flag("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
    st.sampled_from(["--network-interfaces eth0,ib0", "--network-interface eth0",
                     "--network-interface eth0 --network-interface ib0"]).map(str.split),
]  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A line that horovodrun takes, over MPI (which all of these options are for), in any order."""
    chosen = draw(st.lists(st.sampled_from(range(len(OPTIONS))), unique=True))
    parts = [draw(OPTIONS[index]) for index in chosen]
    parts += [draw(HOSTS), [draw(st.sampled_from(["-np", "--num-proc"])), "4"], ["--mpi"]]
    return [word for part in draw(st.permutations(parts)) for word in part]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(words=command_lines())
def test_any_combination_of_options(folder: Path, words: list[str]) -> None:
    same([*words, "python", "train.py"], {})


@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_options_of_one_controller(folder: Path, kind: str) -> None:
    own = {"gloo": ["--gloo-timeout-seconds", "60"], "mpi": ["--mpi-args=-x A=b"]}
    same([f"--{kind}", "-np", "2", *own[kind], "python", "train.py"], {})


def test_every_flag_of_horovodrun_is_known(folder: Path) -> None:
    """But for LSF's launcher, which 0.28.1 cannot start."""
    from hvdtrain.cli.run import run

    parsers: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser) -> None:
        parsers.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        horovod_launch.parse_args()
    theirs = {flag for action in parsers[0]._actions for flag in action.option_strings}
    ours = {flag for one in run.params for flag in (*one.opts, *one.secondary_opts)}
    assert theirs - ours == {"--jsrun", "-h", "--help"}, "the last two are Click's"
