"""Environment variables of the ranks: those that a user asks for, and those that travel to other hosts, to srun's tasks
and into a container.

A rank on the launcher's own host inherits the whole environment. Elsewhere go only the variables below and what the
user asks for with `--env` (`NAME`, or `NAME=VALUE`): the rest (session, agents, shell) means nothing there, and
horovodrun would show each value in the process list of every host.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.environment import FORWARD, LAUNCH_ID, LOG_DIR, RANK_CORES, TERMINAL
from hvdtrain.errors import UsageError
from hvdtrain.rank_variables import is_of_launch
from hvdtrain.strategy_names import REPLICAS, STRATEGY

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
OWN_NAMES = frozenset({LAUNCH_ID, LOG_DIR, RANK_CORES, REPLICAS, STRATEGY, TERMINAL})
"""What ranks read of hvdtrain's own. The other HVDTRAIN_* are options of the launcher, with whatever a user wrote
there: HVDTRAIN_ENV=API_KEY=..."""
NAMES = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
        "LD_PRELOAD",  # An allocator, such as jemalloc.
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LINES"),
        *OWN_NAMES,
    }
)
_OF_THE_RUN = (
    # What a run is made of, and the library.
    *("HOROVOD_", "TF_", "TF2_", "XLA_", "ABSL_"),
    # The numbers' machinery and its threads.
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_"),
    # The network. mpirun reads what is for itself from its own environment.
    *("NCCL_", "UCX_", "OMPI_MCA_", "I_MPI_", "FI_", "IBV_", "GLOO_"),
)
"""These mean the same anywhere."""
_OF_THE_MACHINE = (
    *("PYTHON", "LC_", "MALLOC_", "GRPC_"),
    # Where the library keeps data sets and compiled kernels.
    *("KERAS_", "TFDS_", "TFHUB_"),
    *("CUDA_", "CUDNN_", "NVIDIA_"),
)
"""These may name folders and devices. Hosts of a job are set up alike; a container has its own."""
_AT_START = ("PYTHON", "LC_", "MALLOC_")
_OF_TERRAFORM = ("TF_VAR_", "TF_CLI_")
"""Its prefix is TensorFlow's, and its variables are often secret."""
_SESSION = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
"""What ssh gives a session and srun does not."""
_OPTIONS = "HVDTRAIN_"
_OF_THIS_SETUP = {"HVDTRAIN_CACHE", "HVDTRAIN_VENV", LOG_DIR, LAUNCH_ID}


@dataclass(frozen=True)
class EnvVar:
    """One variable for all ranks.

    Attributes:
        name: as in the environment.
        value: its value; None takes the one that it has where the launch starts. It may be a
            secret, so it is not part of `repr`.
    """

    name: str
    value: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """As `--env` takes it."""
        return self.name if self.value is None else f"{self.name}={self.value}"

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise UsageError(
                f"{self.name!r} is not a valid name of an environment variable: use letters, "
                "digits and '_'"
            )
        if is_of_launch(self.name):
            raise UsageError(f"{self.name} is set by the launcher for each worker: leave it out")
        if self.value is not None and "\0" in self.value:
            raise UsageError(f"the value of {self.name} contains a NUL byte")


def is_name(text: str) -> bool:
    """Whether `text` is a valid variable name in a shell. The environment may contain other names."""
    return bool(_NAME.fullmatch(text))


def forwarded(environ: Mapping[str, str]) -> frozenset[str]:
    """The names requested with `--env`, as a launch passes them to the program that it starts."""
    return frozenset(filter(None, environ.get(FORWARD, "").split(",")))


def parse_variable(text: str) -> EnvVar:
    """The variable of `NAME` or `NAME=VALUE`. Raises UsageError."""
    name, equals, value = text.partition("=")
    return EnvVar(name, value if equals else None)


def without_value(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """An error message about variables requested with --env that are not set; empty if all are set."""
    missing = sorted(set(names) - environ.keys())
    if not missing:
        return ""
    return f"--env {', '.join(missing)}: not set in this environment: set it first"


def travelling(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The variables for ranks on other hosts: the named set, and those requested with --env."""
    wanted = set(asked)
    return {
        name: value
        for name, value in environ.items()
        # Other names are nothing to a shell, which some of the ways to another host lead through.
        if is_name(name) and (name in wanted or name in NAMES or _is_of_a_run(name))
    }


def into_tasks(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The environment for srun and its tasks: the variables for other hosts, and those of a login session."""
    slurm = (name for name in environ if name.startswith("SLURM"))
    return travelling(environ, [*asked, *_SESSION, *slurm])


def into_container(environ: Mapping[str, str], asked: Iterable[str]) -> tuple[str, ...]:
    """Names of the variables for a container: of the libraries, of `hvdtrain run`, and those requested with --env."""
    named = {
        name
        for name in environ
        if is_name(name)
        and name not in _OF_THIS_SETUP
        and (name.startswith(_OPTIONS) or _has_prefix(name, _OF_THE_RUN))
    }
    return tuple(sorted(named | set(asked)))


def acts_at_start(name: str) -> bool:
    """Whether a variable must be there when a rank's process starts: Python and the C library read it then."""
    return name in NAMES or name.startswith(_AT_START)


def _is_of_a_run(name: str) -> bool:
    return _has_prefix(name, _OF_THE_RUN + _OF_THE_MACHINE)


def _has_prefix(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a variable's name has one of them, and is no other program's."""
    return name.startswith(prefixes) and not name.startswith(_OF_TERRAFORM)
