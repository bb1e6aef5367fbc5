"""LaunchPlan: everything that one launch says, checked when it is made.

Its fields are the options of `hvdtrain run`, of its configuration file and of horovodrun 0.28.1;
see `options` for what stands at each field. Left out of horovodrun's options, on purpose:

- `--jsrun`: LSF's launcher. horovodrun 0.28.1 takes the interfaces from the job it has not started.
- `--hostfile`: read by `hosts.read_hostfile` and given on as `-H`; horovodrun's reader fails on
  comments and blank lines.
- `--config-file`: read by `config`; horovodrun's reader ignores unknown keys.
- `--prefix-output-with-timestamp`: `output` does it; mpirun's stamps may stand inside lines.
- `--check-build`, `--version`: of the command, which calls `hvdtrain doctor` and `hvdtrain --version`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from hvdtrain.launch.engine import Controller
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.knobs import Knobs
from hvdtrain.launch.options import Option, Setting, settings_of
from hvdtrain.launch.program import Kind, Program
from hvdtrain.launch.rules import CONDITIONS, ELASTIC, check, is_given
from hvdtrain.launch.variables import EnvVar
from hvdtrain.rank_variables import CONTROLLER


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Knobs):
    """One launch. Raises UsageError for a plan that cannot work.

    Attributes:
        script: the training script, or what `kind` says; each rank runs it.
        arguments: the script's own arguments.
        kind: what `script` is.
        python: the interpreter of the ranks.
        python_options: of the interpreter.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    kind: Kind = "script"
    python: str = sys.executable
    python_options: tuple[str, ...] = ()

    np: Annotated[
        int,
        Option(
            "basic",
            "Number of workers; when elastic, the number to start with.",
            flag="-np",
            names=("-np", "--num-proc"),
            aliases=(
                *("-n", "--np", "--gpus", "--nproc-per-node", "--nproc_per_node"),
                *("--num-processes", "--num_processes"),
            ),
            metavar="N",
            least=1,
            unset="all slots of the hosts or the job; else a worker a GPU, or a core, at most 8",
        ),
    ]
    controller: Annotated[
        Controller,
        Option(
            "basic",
            "What the workers coordinate through; auto: MPI if Horovod was built with it, else Gloo.",
            aliases=("--gloo", "--mpi"),
            environment=CONTROLLER,
        ),
    ]
    launcher: Annotated[
        str,
        Option(
            "basic",
            "What starts the workers; auto: srun in a Slurm job of several nodes, else horovodrun.",
        ),
    ] = "horovodrun"
    env: Annotated[
        tuple[EnvVar, ...],
        Option(
            "basic",
            "An environment variable for the workers on all hosts, again for each. NAME alone takes "
            "the value that it has here, and shows it nowhere.",
            metavar="NAME[=VALUE]",
        ),
    ] = ()
    output_filename: Annotated[
        Path | None,
        Option(
            "basic",
            "Folder in which the launcher keeps every worker's output, beside --log-dir.",
            flag="--output-filename",
            metavar="FOLDER",
            needs=("horovodrun",),
        ),
    ] = None
    verbose: Annotated[
        bool,
        Option(
            "basic",
            "Show the command and what the launcher says.",
            flag="--verbose",
        ),
    ] = False

    hosts: Annotated[
        tuple[Host, ...],
        Option(
            "hosts",
            "Hosts and how many workers each takes, filled in this order.",
            flag="-H",
            names=("--hosts", "-H"),
            metavar="NAME:SLOTS,...",
            unset="this machine",
        ),
    ] = ()
    network_interfaces: Annotated[
        tuple[str, ...],
        Option(
            "hosts",
            "Network interfaces to communicate over, such as eth0. Gloo takes one of them.",
            flag="--network-interfaces",
            aliases=("--network-interface",),
            metavar="NAME,...",
            unset="found by trying",
        ),
    ] = ()
    start_timeout: Annotated[
        int | None,
        Option(
            "hosts",
            "Time for the hosts to answer and the workers to start.",
            flag="--start-timeout",
            metavar="SECONDS",
            least=1,
            unset="30, and 2 more for each further host; 300 for srun",
            environment="HOROVOD_START_TIMEOUT",
        ),
    ] = None
    disable_cache: Annotated[
        bool,
        Option(
            "hosts",
            "Do not go by what horovodrun remembers of the hosts from the last hour.",
            flag="--disable-cache",
            needs=("horovodrun",),
        ),
    ] = False

    ssh_port: Annotated[
        int | None,
        Option(
            "ssh",
            "Port of the other hosts' ssh.",
            flag="--ssh-port",
            names=("--ssh-port", "-p"),
            metavar="PORT",
            least=1,
            most=65535,
            needs=("horovodrun",),
        ),
    ] = None
    ssh_identity_file: Annotated[
        Path | None,
        Option(
            "ssh",
            "Key to reach the other hosts with.",
            flag="--ssh-identity-file",
            names=("--ssh-identity-file", "-i"),
            metavar="FILE",
            needs=("horovodrun",),
        ),
    ] = None

    host_discovery_script: Annotated[
        Path | None,
        Option(
            "elastic",
            "A program that prints the hosts that there are now, a line NAME or NAME:SLOTS each.",
            flag="--host-discovery-script",
            metavar="FILE",
        ),
    ] = None
    slots_per_host: Annotated[
        int | None,
        Option(
            "elastic",
            "Workers on a host that --host-discovery-script prints without slots.",
            flag="--slots-per-host",
            aliases=("--slots",),
            metavar="N",
            least=1,
            needs=("discovery",),
            unset="1",
        ),
    ] = None
    min_np: Annotated[
        int | None,
        Option(
            "elastic",
            "With fewer workers training waits for more.",
            flag="--min-np",
            names=("--min-np", "--min-num-proc"),
            metavar="N",
            least=1,
            unset="-np",
        ),
    ] = None
    max_np: Annotated[
        int | None,
        Option(
            "elastic",
            "More workers than this are not started.",
            flag="--max-np",
            names=("--max-np", "--max-num-proc"),
            metavar="N",
            least=1,
            unset="no limit",
        ),
    ] = None
    elastic_timeout: Annotated[
        int | None,
        Option(
            "elastic",
            "Time for the workers to meet again after their number changed.",
            flag="--elastic-timeout",
            metavar="SECONDS",
            least=1,
            needs=("elastic",),
            unset="600",
        ),
    ] = None
    reset_limit: Annotated[
        int | None,
        Option(
            "elastic",
            "End the job when the number of workers has changed this often.",
            flag="--reset-limit",
            metavar="N",
            least=1,
            needs=("elastic",),
            unset="no limit",
        ),
    ] = None
    blacklist_cooldown_range: Annotated[
        tuple[int, int] | None,
        Option(
            "elastic",
            "A host that failed is used again after a time between these, longer each time it fails.",
            flag="--blacklist-cooldown-range",
            metavar="MIN MAX",
            least=1,
            most=3600,
            needs=("elastic",),
            unset="10 300",
        ),
    ] = None

    @property
    def program(self) -> Program:
        """What each rank runs."""
        return Program(self.script, self.arguments, self.kind, self.python, self.python_options)

    @property
    def elastic(self) -> bool:
        """Whether workers may come and go."""
        return any((self.host_discovery_script, self.min_np, self.max_np))

    def __post_init__(self) -> None:
        check(self)


def without_effect(values: Mapping[str, Any]) -> list[tuple[Setting, str]]:
    """The fields that would have no effect in a plan of these values, and what would give them one."""
    settings = settings_of(LaunchPlan)
    plan: Any = SimpleNamespace(**{one.field: one.default for one in settings} | dict(values))
    plan.elastic = any(values.get(name) for name in ELASTIC)
    return [
        (setting, CONDITIONS[need].remedy)
        for setting in settings
        if is_given(getattr(plan, setting.field))
        for need in setting.option.needs
        if not CONDITIONS[need].met(plan)
    ]
