"""What Horovod does inside the ranks: tuning, autotuning, timeline, stall check, libraries, log.

horovodrun turns these options into environment variables of the ranks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from hvdtrain.environment import STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.launch.options import Option

LogLevel = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The part of a LaunchPlan that is about Horovod itself. None leaves it to Horovod."""

    fusion_threshold_mb: Annotated[
        int | None,
        Option(
            "tuning",
            "Tensors are put together for one collective up to this size; 0: never.",
            flag="--fusion-threshold-mb",
            metavar="MB",
            least=0,
            unset="128",
        ),
    ] = None
    cycle_time_ms: Annotated[
        float | None,
        Option(
            "tuning",
            "How often Horovod looks for tensors that are ready.",
            flag="--cycle-time-ms",
            metavar="MILLISECONDS",
            least=0,
            unset="1; shorter where it pays",
        ),
    ] = None
    cache_capacity: Annotated[
        int | None,
        Option(
            "tuning",
            "Names of tensors to remember, which saves asking all workers again; 0: none.",
            flag="--cache-capacity",
            metavar="N",
            least=0,
            unset="1024",
        ),
    ] = None
    hierarchical_allreduce: Annotated[
        bool | None,
        Option(
            "tuning",
            "Allreduce inside each host by NCCL, then between the hosts by MPI.",
            flag="--hierarchical-allreduce",
            off="--no-hierarchical-allreduce",
            needs=("mpi", "several hosts"),
        ),
    ] = None
    hierarchical_allgather: Annotated[
        bool | None,
        Option(
            "tuning",
            "Allgather inside each host, then between the hosts by MPI.",
            flag="--hierarchical-allgather",
            off="--no-hierarchical-allgather",
            needs=("mpi", "several hosts"),
        ),
    ] = None
    torus_allreduce: Annotated[
        bool | None,
        Option(
            "tuning",
            "As --hierarchical-allreduce, but by NCCL between the hosts too.",
            flag="--torus-allreduce",
            off="--no-torus-allreduce",
            needs=("several hosts",),
        ),
    ] = None

    autotune: Annotated[
        bool | None,
        Option(
            "autotune",
            "Let Horovod try values of the tuning options that are not given.",
            flag="--autotune",
            off="--no-autotune",
        ),
    ] = None
    autotune_log_file: Annotated[
        Path | None,
        Option(
            "autotune",
            "CSV file of the values tried and their scores; the last line is the best.",
            flag="--autotune-log-file",
            metavar="FILE",
            needs=("autotune",),
        ),
    ] = None
    autotune_warmup_samples: Annotated[
        int | None,
        Option(
            "autotune",
            "Samples that do not count, at the beginning.",
            flag="--autotune-warmup-samples",
            metavar="N",
            least=0,
            needs=("autotune",),
            unset="3",
        ),
    ] = None
    autotune_steps_per_sample: Annotated[
        int | None,
        Option(
            "autotune",
            "Training steps of a sample.",
            flag="--autotune-steps-per-sample",
            metavar="N",
            least=1,
            needs=("autotune",),
            unset="10",
        ),
    ] = None
    autotune_bayes_opt_max_samples: Annotated[
        int | None,
        Option(
            "autotune",
            "Samples after which the search ends.",
            flag="--autotune-bayes-opt-max-samples",
            metavar="N",
            least=1,
            needs=("autotune",),
            unset="20",
        ),
    ] = None
    autotune_gaussian_process_noise: Annotated[
        float | None,
        Option(
            "autotune",
            "How noisy samples are thought to be, 0 to 1.",
            flag="--autotune-gaussian-process-noise",
            metavar="NUMBER",
            least=0,
            most=1,
            needs=("autotune",),
            unset="0.8",
        ),
    ] = None

    timeline_filename: Annotated[
        Path | None,
        Option(
            "timeline",
            "Record Horovod's events in this JSON file, for chrome://tracing. Costs time.",
            flag="--timeline-filename",
            metavar="FILE",
        ),
    ] = None
    timeline_mark_cycles: Annotated[
        bool | None,
        Option(
            "timeline",
            "Mark Horovod's cycles in the timeline.",
            flag="--timeline-mark-cycles",
            off="--no-timeline-mark-cycles",
            needs=("timeline",),
        ),
    ] = None

    stall_check: Annotated[
        bool,
        Option(
            "stall",
            "Watch for workers that wait for others.",
            off="--no-stall-check",
        ),
    ] = True
    stall_warning_seconds: Annotated[
        int,
        Option(
            "stall",
            "Warn when some workers wait this long for the others.",
            flag="--stall-check-warning-time-seconds",
            aliases=("--stall-check-warning-time-seconds",),
            environment="HOROVOD_STALL_CHECK_TIME_SECONDS",
            metavar="SECONDS",
            least=1,
        ),
    ] = STALL_WARNING_SECONDS
    stall_shutdown_seconds: Annotated[
        int,
        Option(
            "stall",
            "End the job after this; 0: never.",
            flag="--stall-check-shutdown-time-seconds",
            aliases=("--stall-check-shutdown-time-seconds",),
            environment="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            metavar="SECONDS",
            least=0,
        ),
    ] = STALL_SHUTDOWN_SECONDS

    gloo_timeout_seconds: Annotated[
        int | None,
        Option(
            "library",
            "Longest wait inside one of Gloo's operations.",
            flag="--gloo-timeout-seconds",
            metavar="SECONDS",
            least=1,
            needs=("gloo",),
            unset="30",
        ),
    ] = None
    mpi_args: Annotated[
        str | None,
        Option(
            "library",
            "Further options for mpirun, in one word: --mpi-args='--mca btl_tcp_links 2'.",
            flag="--mpi-args",
            metavar="OPTIONS",
            needs=("mpi", "horovodrun"),
        ),
    ] = None
    binding_args: Annotated[
        str | None,
        Option(
            "library",
            "mpirun's options for binding processes to cores, in one word.",
            flag="--binding-args",
            metavar="OPTIONS",
            needs=("mpi", "horovodrun"),
            unset="-bind-to none -map-by slot",
        ),
    ] = None
    mpi_threads_disable: Annotated[
        bool | None,
        Option(
            "library",
            "Let MPI run without support for threads (mpi4py beside Horovod needs it).",
            flag="--mpi-threads-disable",
            off="--no-mpi-threads-disable",
            needs=("mpi",),
        ),
    ] = None
    tcp: Annotated[
        bool,
        Option(
            "library",
            "Communicate over TCP only: NCCL without InfiniBand.",
            flag="--tcp",
        ),
    ] = False
    num_nccl_streams: Annotated[
        int | None,
        Option(
            "library",
            "CUDA streams for NCCL.",
            flag="--num-nccl-streams",
            metavar="N",
            least=1,
            unset="1",
        ),
    ] = None
    thread_affinity: Annotated[
        int | None,
        Option(
            "library",
            "Bind Horovod's own thread to this core.",
            flag="--thread-affinity",
            metavar="CORE",
            least=0,
            needs=("one worker a host",),
        ),
    ] = None

    log_level: Annotated[
        LogLevel | None,
        Option(
            "logging",
            "What Horovod's core says on standard error.",
            flag="--log-level",
            unset="WARNING",
        ),
    ] = None
    log_with_timestamp: Annotated[
        bool | None,
        Option(
            "logging",
            "The time in each line of Horovod's log.",
            flag="--log-with-timestamp",
            off="--log-without-timestamp",
            names=("--log-with-timestamp/--log-without-timestamp",),
            aliases=("--no-log-hide-timestamp/--log-hide-timestamp",),
        ),
    ] = None
