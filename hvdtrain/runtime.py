"""Make this process a rank of the job: start Horovod, pin the GPU, set the number of CPU threads, seed.

Call `init` before the first TensorFlow operation, which fixes TensorFlow's thread counts and GPU memory settings.
`hvdtrain run` sets the thread counts even earlier, in the worker's environment.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.errors import EngineError, HvdtrainError, UsageError, warn_user
from hvdtrain.host_limits import available_cores
from hvdtrain.profiled_steps import asked_steps
from hvdtrain.rank_variables import CONTROLLER, CPU_OPERATIONS, is_one_host, is_rank, size_of
from hvdtrain.strategy_names import (
    REPLICAS,
    STRATEGIES,
    STRATEGY,
    replicas_of,
    strategy_of,
)
from hvdtrain.tf_config import lost_server, read_tf_config
from hvdtrain.worker.cpu_scheduling import (
    kernel_knows_slices,
    schedule_horovod,
    threads_of_this_process,
)
from hvdtrain.worker.heartbeat import beat
from hvdtrain.worker.phases import follow_imported
from hvdtrain.worker.rank_environment import rank_environment
from hvdtrain.worker.stuck_rank import end_when_stuck

GONE = "Horovod has not been initialized"
"""Horovod's message before it has started, and after it has shut down because another rank ended."""

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Variable with which TensorFlow takes the memory of GPUs as it needs it, if "true"; read at its first operation."""

NO_NCCL = "ncclCommInitRank failed"
"""Part of Horovod's message when NCCL cannot create a communicator."""


@dataclass(frozen=True)
class Rank:
    """Rank of this process in the job, and the number of ranks.

    Attributes:
        rank: Number of this process in the job, from 0.
        size: Number of ranks in the job.
        local_rank: Number of this process on its host, from 0.
        local_size: Number of ranks on its host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints to the terminal."""
        return self.rank == 0


class RankGroups(Protocol):
    """The part of hvdtrain.Mesh that `init` uses: the groups in which ranks communicate."""

    def rank_lists(self, ranks: int) -> list[list[int]]:
        """Return the ranks of each process set of a job of `ranks` ranks.

        Raises:
            UsageError: The mesh does not fit that number of ranks.
        """


def engine_environment(environ: Mapping[str, str], kernel: str) -> dict[str, str]:
    """Return Horovod's and MPI's variables that a rank should have and `environ` lacks.

    They keep waiting ranks from taking CPU time, and let a timeline begin later.

    Args:
        environ: Environment of this process.
        kernel: Release of the operating system's kernel.

    Raises:
        UsageError: HVDTRAIN_PROFILE is invalid.
    """
    # A rank that waits inside MPI spins; where ranks fill the cores, that takes time from its own
    # computation (measured: a small network trained 1.25 times faster with this on two cores).
    wanted = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    over_gloo = environ.get(CONTROLLER) == "gloo"
    # Autotuning leaves what is set as it is.
    tuned = environ.get("HOROVOD_AUTOTUNE") == "1"
    if kernel_knows_slices(kernel) and is_one_host(environ) and not (over_gloo or tuned):
        # Horovod checks every millisecond which tensors are ready. Checking more often costs nothing where
        # its thread is scheduled at once (see schedule_promptly): 1.05 times faster on the same network.
        # Over Gloo it gained nothing.
        wanted["HOROVOD_CYCLE_TIME"] = "0.3"
    if asked_steps(environ) is not None and is_rank(environ):
        # Horovod runs a thread for the timeline from now on, which takes what time the cores have left.
        wanted["HOROVOD_TIMELINE"] = "DYNAMIC"
    return {name: value for name, value in wanted.items() if name not in environ}


def controller_environment(environ: Mapping[str, str], default: str) -> dict[str, str]:
    """Return the variables to change while Horovod starts.

    Controller and CPU operations of different kinds end Horovod 0.28.1 with a segmentation fault at the first
    allgather, since either sets up its own connections only.

    Args:
        environ: Environment of this process.
        default: What Horovod takes for both where no variable says otherwise: "mpi" or "gloo".
    """
    # No MPI without a launcher: outside mpirun it cannot find its daemon.
    controller = environ.get(CONTROLLER, default if is_rank(environ) else "gloo").lower()
    operations = environ.get(CPU_OPERATIONS, default).lower()
    wanted = {} if is_rank(environ) else {CONTROLLER: controller}
    return wanted | (
        {CPU_OPERATIONS: controller} if {controller, operations} == {"mpi", "gloo"} else {}
    )


def load_horovod() -> Any:
    """Import and return horovod.tensorflow.

    Raises:
        EngineError: Horovod is not installed or does not load; the message says how to build it.
    """
    if is_rank(os.environ) and "mpi4py.MPI" in sys.modules and "tensorflow" not in sys.modules:
        warn_user(
            "mpi4py was imported before TensorFlow: Open MPI may crash when this process ends. Import TensorFlow "
            "first, or start the script with hvdtrain run, which does so"
        )
    try:
        return importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise EngineError(
            f"Horovod cannot be loaded: {error}. Build it for this environment: hvdtrain "
            "install-horovod"
        ) from error


def start_horovod(*args: Any, **kwargs: Any) -> None:
    """Set this rank's environment and call Horovod's `init` with the same arguments; do nothing if it runs already.

    The environment includes thread counts, which TensorFlow reads at its first operation.

    Raises:
        EngineError: Horovod is not installed or does not load.
        UsageError: HVDTRAIN_HANG_TIMEOUT or HVDTRAIN_PROFILE is invalid.
    """
    hvd = load_horovod()
    if hvd.is_initialized():
        return
    os.environ.update(rank_environment(os.environ, available_cores()))
    os.environ.update(engine_environment(os.environ, platform.release()))
    end_when_stuck(os.environ)
    before = threads_of_this_process()
    beat("init", waiting=True)
    with _variables(controller_environment(os.environ, "mpi" if hvd.mpi_built() else "gloo")):
        hvd.init(*args, **kwargs)
    beat("script")
    schedule_horovod(threads_of_this_process() - before, over_gloo=hvd.gloo_enabled())
    follow_imported()


def init(
    seed: int | None = None, mesh: RankGroups | None = None, *, whole_machine: bool = False
) -> Rank:
    """Make this process a rank of the job: start Horovod, pin the GPU, set the thread counts and, if given, the seed.

    Calling it again is safe. Without a launcher the job has one rank. After this call, an uncaught HvdtrainError is
    printed as one message without a traceback.

    Args:
        seed: Seed of Python, NumPy and Keras, the same on all ranks, so that initial weights and shuffles agree.
        mesh: Mesh (hvdtrain.Mesh) of a model that is divided over the ranks. Horovod creates its process sets when it
            starts.
        whole_machine: Use all devices of the machine instead of one GPU. Always so if HVDTRAIN_STRATEGY names a
            strategy that needs it (tpu, central-storage).

    Returns:
        The rank of this process.

    Raises:
        EngineError: Horovod is not installed or does not load.
        UsageError: The host has fewer visible GPUs than ranks (or than HVDTRAIN_REPLICAS), TensorFlow was used before
            this call, the mesh does not fit the number of ranks, or one of HVDTRAIN_STRATEGY, HVDTRAIN_REPLICAS,
            HVDTRAIN_HANG_TIMEOUT and HVDTRAIN_PROFILE is invalid.
    """
    sys.excepthook = _message_alone
    hvd = load_horovod()
    import keras

    groups = [] if mesh is None else mesh.rank_lists(size_of(os.environ))
    start_horovod(process_sets=[hvd.ProcessSet(group) for group in groups])
    rank = Rank(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    if mesh is not None:
        mesh.rank_lists(rank.size)  # In case Horovod reports a different number than the launcher.
    if whole_machine or STRATEGIES[strategy_of(os.environ)].runs_as == "one process":
        _take_all_devices(replicas_of(os.environ))
    else:
        _pin_gpu(rank)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    return rank


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside this block: programs that this process starts later are launches of their own."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shutdown() -> None:
    """Shut Horovod down. No collective can be called afterwards."""
    import horovod.tensorflow as hvd

    if hvd.is_initialized():
        hvd.shutdown()


@contextmanager
def engine_errors(rank: Rank) -> Iterator[None]:
    """Turn the failure of a collective inside this block into an EngineError that explains it.

    Args:
        rank: Rank of this process, for the message.

    Raises:
        EngineError: Another rank failed, ended or was too late for a collective, or a parameter server is lost.
    """
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        message = str(getattr(error, "message", error))
        config = read_tf_config(os.environ)
        lost = None if config is None else lost_server(message, config)
        if lost and isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            raise EngineError(lost) from None
        # size() also fails when Horovod's thread has ended.
        of_horovod = "orovod" if isinstance(error, tf.errors.OpError) else GONE
        if of_horovod not in message:
            raise
        reason = message.strip().splitlines()[0]
        if NO_NCCL in message:
            raise EngineError(
                f"Rank {rank.rank}: NCCL could not connect the GPUs of the ranks. It refuses two ranks on one GPU: "
                "start at most one rank per GPU, or use a Horovod without NCCL (hvdtrain install-horovod --force). "
                f"Otherwise NCCL_DEBUG=WARN shows the reason. Horovod says: {reason}"
            ) from error
        raise EngineError(
            f"Rank {rank.rank}: Horovod stopped in the middle of a collective. Another rank failed or ended, or "
            "the ranks waited too long for one of them (then rank 0's log names the collective and the missing "
            f"ranks; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is the limit). Horovod says: {reason}"
        ) from error


def _message_alone(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """sys.excepthook that prints an HvdtrainError without its traceback."""
    if isinstance(error, HvdtrainError):
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code)  # Otherwise Python exits with 1.
    sys.__excepthook__(kind, error, trace)


def _pin_gpu(rank: Rank) -> None:
    """Make one GPU visible to this rank, and let its memory grow as needed."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    if not gpus or len(visible) == 1 < len(gpus):
        return
    if visible == gpus[:1] and tf.config.experimental.get_memory_growth(gpus[0]):
        return  # By an earlier call.
    if len(gpus) == 1:
        # The launcher or Slurm showed each rank its own GPU, or the host has just one.
        mine = gpus[0]
    elif rank.local_rank < len(gpus):
        mine = gpus[rank.local_rank]
    else:
        raise UsageError(
            f"Rank {rank.rank} is local rank {rank.local_rank} on its host, and only "
            f"{len(gpus)} GPUs can be used there: start at most one rank per GPU (-np, or slots in "
            "the host list), or set CUDA_VISIBLE_DEVICES"
        )
    if _context_is_open():
        if rank.local_size == 1:
            # The only rank of its host: layers may be on several GPUs.
            _warn_of_taken_memory(visible)
            return
        raise UsageError(
            f"Rank {rank.rank}: TensorFlow was used before hvdtrain.init(), so the GPU can no "
            "longer be pinned: call hvdtrain.init() first, before building a model"
        )
    tf.config.set_visible_devices(mine, "GPU")
    tf.config.experimental.set_memory_growth(mine, True)


def _warn_of_taken_memory(gpus: Sequence[Any]) -> None:
    """Warn if TensorFlow has begun to use `gpus` by taking all of their memory, which is its default."""
    import tensorflow as tf

    def is_taken(gpu: Any) -> bool:
        growing = tf.config.experimental.get_memory_growth(gpu)
        return not growing and tf.config.get_logical_device_configuration(gpu) is None

    if os.environ.get(GROWTH) != "true" and any(map(is_taken, gpus)):
        warn_user(
            "TensorFlow was used before hvdtrain.init(), and has taken all memory of "
            f"{'the GPU' if len(gpus) == 1 else f'{len(gpus)} GPUs'}: another program on the same GPU fails, and what "
            "is allocated outside of TensorFlow (NCCL's buffers) may. Call hvdtrain.init() first, before building a "
            f"model, or set {GROWTH}=true"
        )


def _take_all_devices(replicas: int | None) -> None:
    """Make all GPUs, or the first `replicas`, visible to this process; without GPUs, make `replicas` logical CPUs."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and replicas is not None and replicas > len(gpus):
        raise UsageError(
            f"{REPLICAS}={replicas}: at most {len(gpus)}, the number of GPUs that can be used here"
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    if gpus:
        wanted = gpus[:replicas]
        settled = tf.config.get_visible_devices("GPU") == wanted
    else:
        logical = tf.config.get_logical_device_configuration(cpu)
        settled = replicas is None or len(logical or [None]) == replicas
    if settled:
        return
    if _context_is_open():
        raise UsageError(
            "TensorFlow was used before its devices could be set for several replicas: call hvdtrain.init() first, "
            f"before creating a model, an optimizer or a metric, with {STRATEGY} and {REPLICAS} in the environment "
            "(hvdtrain run --strategy sets them)"
        )
    if gpus:
        tf.config.set_visible_devices(wanted, "GPU")
        for gpu in wanted:
            tf.config.experimental.set_memory_growth(gpu, True)
    else:
        each = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [each] * (replicas or 1))


def _context_is_open() -> bool:
    """Whether TensorFlow has initialized its devices, after which its settings are fixed."""
    from tensorflow.python.eager import context

    return context.context()._initialized
