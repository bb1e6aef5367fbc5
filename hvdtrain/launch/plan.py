"""LaunchPlan: all settings of one launch, validated on creation.

Its fields are the options of `hvdtrain run`, of its configuration file and of horovodrun 0.28.1;
see `option_types`. These options of horovodrun are left out on purpose:

- `--jsrun`: LSF's launcher. horovodrun 0.28.1 reads the interfaces from the job it has not started.
- `--hostfile`: read by `hosts.read_hostfile` and passed as `-H`; horovodrun's parser fails on
  comments and blank lines.
- `--config-file`: read by `config_files`; horovodrun's reader ignores unknown keys.
- `--prefix-output-with-timestamp`: done by `output`; mpirun's timestamps may appear inside lines.
- `--check-build`, `--version`: see `hvdtrain doctor` and `hvdtrain --version`.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.environment import STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import MOST_SLOTS, Host
from hvdtrain.launch.installed_horovod import Controller
from hvdtrain.launch.option_types import option
from hvdtrain.launch.plan_validation import check
from hvdtrain.launch.rank_program import Program
from hvdtrain.rank_variables import CONTROLLER

LogLevel = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Settings of one launch: the program that each rank runs, and the options of `hvdtrain run`.

    Every field except `program` is declared with `option`, which documents its meaning (`help`), its unit (`metavar`:
    SECONDS, MILLISECONDS, MB, N), its range (`least`, `most`), its prerequisites (`needs`), and the effect of None
    (`unset`: mostly Horovod's default).

    Attributes:
        program: Program that each rank runs.

    Raises:
        UsageError: An option is invalid, or the options cannot be combined.
    """

    program: Program

    # fmt: off
    np: int = option(
        "basic", "Number of workers. In an elastic job, the number to start with.", MISSING, flag="-np",
        names=("-np", "--num-proc"), metavar="N", least=1, most=MOST_SLOTS,
        aliases=("-n", "--np", "--gpus", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes"),
        unset="all slots of the hosts or of the Slurm job; else one per GPU, or per core, at most 8")
    controller: Controller = option(
        "basic", "How the workers coordinate. auto: MPI if Horovod was built with it and mpirun is in PATH, else Gloo; "
        "Gloo for elastic jobs and srun.", MISSING, flag="",
        aliases=("--gloo", "--mpi"), environment=CONTROLLER)
    launcher: str = option(
        "basic", "What starts the workers. auto: srun in a Slurm job of several nodes, else horovodrun.", "horovodrun",
        flag="")
    env: tuple[EnvVar, ...] = option(
        "basic", "Set an environment variable for the workers on all hosts. NAME alone passes the value from this "
        "environment, which is never printed. May be repeated.", (), flag="", metavar="NAME[=VALUE]")
    output_filename: Path | None = option(
        "output", "Folder for every worker's output, written by the launcher in addition to --log-dir.",
        metavar="FOLDER", needs=("horovodrun",))
    verbose: bool = option("basic", "Show the command and the launcher's own messages.", False)

    hosts: tuple[Host, ...] = option(
        "hosts", "Hosts and the number of workers on each, filled in this order.", (), flag="-H",
        names=("--hosts", "-H"), metavar="NAME:SLOTS,...", unset="this machine")
    network_interfaces: tuple[str, ...] = option(
        "ssh", "Network interfaces to use, such as eth0. Gloo uses one of them.", (),
        aliases=("--network-interface",), metavar="NAME,...", unset="detected")
    start_timeout: int | None = option(
        "ssh", "Time limit for the hosts to answer and the workers to start.", metavar="SECONDS", least=1,
        unset="30, plus 2 for each additional host; 300 for srun", environment="HOROVOD_START_TIMEOUT")
    disable_cache: bool = option(
        "ssh", "Check the hosts again, even if horovodrun did so within the last hour.", False, needs=("horovodrun",))

    ssh_port: int | None = option(
        "ssh", "Port of ssh on the other hosts.", names=("--ssh-port", "-p"), metavar="PORT", least=1, most=65535,
        needs=("horovodrun",))
    ssh_identity_file: Path | None = option(
        "ssh", "Private key for the other hosts.", names=("--ssh-identity-file", "-i"), metavar="FILE",
        needs=("horovodrun",))

    host_discovery_script: Path | None = option(
        "elastic", "Executable that prints the available hosts, one per line: NAME or NAME:SLOTS.",
        metavar="FILE")
    slots_per_host: int | None = option(
        "elastic", "Number of workers on a host that --host-discovery-script prints without slots.",
        aliases=("--slots",), metavar="N", least=1, needs=("discovery",), unset="1")
    min_np: int | None = option(
        "elastic", "Minimum number of workers; with fewer, training waits for more.",
        names=("--min-np", "--min-num-proc"), metavar="N", least=1, unset="-np")
    max_np: int | None = option(
        "elastic", "Maximum number of workers.", names=("--max-np", "--max-num-proc"), metavar="N", least=1,
        unset="no limit")
    elastic_timeout: int | None = option(
        "elastic", "Time limit for the workers to reconnect after their number has changed.", metavar="SECONDS",
        least=1, needs=("elastic",), unset="600")
    reset_limit: int | None = option(
        "elastic", "End the job when the number of workers has changed this many times.", metavar="N", least=1,
        needs=("elastic",), unset="no limit")
    blacklist_cooldown_range: tuple[int, int] | None = option(
        "elastic", "Seconds for which a host is skipped after repeated failures: 2 to 3 times MIN at first, then "
        "longer each time, up to MAX.",
        metavar="MIN MAX", least=1, most=3600, needs=("elastic",), unset="10 300")

    fusion_threshold_mb: int | None = option(
        "tuning", "Fuse small tensors into one collective up to this size; 0 turns fusion off.", metavar="MB", least=0,
        unset="128")
    cycle_time_ms: float | None = option(
        "tuning", "Time between Horovod's checks for ready tensors.", metavar="MILLISECONDS", least=0,
        unset="1; less where that is faster")
    cache_capacity: int | None = option(
        "tuning", ("Number of entries in the response cache, which avoids renegotiating known tensors; 0 "
                   "turns it off."),
        metavar="N", least=0, unset="1024")
    hierarchical_allreduce: bool | None = option(
        "tuning", "Allreduce within each host with NCCL, then across hosts with MPI.", needs=("mpi", "several hosts"))
    hierarchical_allgather: bool | None = option(
        "tuning", "Allgather within each host, then across hosts with MPI.", needs=("mpi", "several hosts"))
    torus_allreduce: bool | None = option(
        "tuning", "Like --hierarchical-allreduce, but with NCCL across hosts as well.", needs=("several hosts",))

    autotune: bool | None = option(
        "autotune", ("Let Horovod tune the options above that are not given. Later runs of the same script start with "
                     "the values found."))
    autotune_log_file: Path | None = option(
        "autotune", "CSV file of the values tried and their scores; the last line is the best.", metavar="FILE",
        needs=("autotune",))
    autotune_warmup_samples: int | None = option(
        "autotune", "Number of samples to discard at the start.", metavar="N", least=0, needs=("autotune",), unset="3")
    autotune_steps_per_sample: int | None = option(
        "autotune", "Training steps per sample.", metavar="N", least=1, needs=("autotune",), unset="10")
    autotune_bayes_opt_max_samples: int | None = option(
        "autotune", "Number of samples after which tuning ends.", metavar="N", least=1, needs=("autotune",), unset="20")
    autotune_gaussian_process_noise: float | None = option(
        "autotune", "Assumed noise of the samples, from 0 to 1.", metavar="NUMBER", least=0, most=1,
        needs=("autotune",), unset="0.8")

    timeline_filename: Path | None = option(
        "timeline",
        "Write a timeline of Horovod's operations to this JSON file, for chrome://tracing. Slows down "
        "training.",
        metavar="FILE")
    timeline_mark_cycles: bool | None = option(
        "timeline", "Mark Horovod's cycles in the timeline.", needs=("timeline",))

    stall_check: bool = option(
        "stall", "Check for workers that wait for others in a collective.", True, flag="", off="--no-stall-check")
    stall_warning_seconds: int = option(
        "stall", "Warn when some workers have waited this long for others.", STALL_WARNING_SECONDS,
        flag="--stall-check-warning-time-seconds", aliases=("--stall-check-warning-time-seconds",),
        environment="HOROVOD_STALL_CHECK_TIME_SECONDS", metavar="SECONDS", least=1)
    stall_shutdown_seconds: int = option(
        "stall", "End the job when some workers have waited this long; 0: never.", STALL_SHUTDOWN_SECONDS,
        flag="--stall-check-shutdown-time-seconds", aliases=("--stall-check-shutdown-time-seconds",),
        environment="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", metavar="SECONDS", least=0)

    gloo_timeout_seconds: int | None = option(
        "library", "Time limit of a single Gloo operation.", metavar="SECONDS", least=1, needs=("gloo",),
        unset="30")
    mpi_args: str | None = option(
        "library", "More options for mpirun, as one argument, such as --mpi-args='--mca btl_tcp_links 2'.",
        metavar="OPTIONS", needs=("mpi", "horovodrun"))
    binding_args: str | None = option(
        "library", "mpirun's options for binding processes to cores, as one argument.", metavar="OPTIONS",
        needs=("mpi", "horovodrun"), unset="-bind-to none -map-by slot")
    mpi_threads_disable: bool | None = option(
        "library", "Initialize MPI without thread support, which mpi4py in the script would need.", needs=("mpi",))
    tcp: bool = option("library", "Communicate over TCP only: NCCL without InfiniBand.", False)
    num_nccl_streams: int | None = option("library", "CUDA streams for NCCL.", metavar="N", least=1, unset="1")
    thread_affinity: int | None = option(
        "library", "Bind Horovod's background thread to this core.", metavar="CORE", least=0,
        needs=("one worker per host",))

    log_level: LogLevel | None = option(
        "logging", "Minimum level of Horovod's messages on standard error.", unset="WARNING")
    log_with_timestamp: bool | None = option(
        "logging", "Prefix each of Horovod's messages with the time.", off="--log-without-timestamp",
        names=("--log-with-timestamp/--log-without-timestamp",),
        aliases=("--no-log-hide-timestamp/--log-hide-timestamp",))
    # fmt: on

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return any((self.host_discovery_script, self.min_np, self.max_np))

    def __post_init__(self) -> None:
        check(self)
