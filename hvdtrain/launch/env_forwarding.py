"""Select the environment variables that ranks receive: those requested by the user, and those forwarded to other
hosts, to srun's tasks and into a container.

Ranks on the launcher's own host inherit the whole environment. Elsewhere they receive only the variables below and
those requested with `--env` (`NAME` or `NAME=VALUE`). The rest (session, agents, shell) is meaningless there, and
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
"""The HVDTRAIN_* variables that ranks read. The others are options of the launcher, and may hold anything the user
typed, such as HVDTRAIN_ENV=API_KEY=..."""
NAMES = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
        "LD_PRELOAD",  # An allocator, such as jemalloc.
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LINES"),
        *OWN_NAMES,
    }
)
_OF_THE_RUN = (
    # Horovod, TensorFlow and their libraries.
    *("HOROVOD_", "TF_", "TF2_", "XLA_", "ABSL_"),
    # Math libraries and their threads.
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_"),
    # The network. mpirun reads its own settings from its own environment.
    *("NCCL_", "UCX_", "OMPI_MCA_", "I_MPI_", "FI_", "IBV_", "GLOO_"),
)
"""Prefixes of variables that mean the same on any machine."""
_OF_THE_MACHINE = (
    *("PYTHON", "LC_", "MALLOC_", "GRPC_"),
    # Where libraries keep data sets and compiled kernels.
    *("KERAS_", "TFDS_", "TFHUB_"),
    *("CUDA_", "CUDNN_", "NVIDIA_"),
)
"""Prefixes of variables that may name folders and devices. The hosts of a job share one setup; a container differs."""
_AT_START = ("PYTHON", "LC_", "MALLOC_")
_OF_TERRAFORM = ("TF_VAR_", "TF_CLI_")
"""Terraform's variables share TensorFlow's prefix, and often hold secrets."""
_SESSION = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
"""Variables that ssh sets for a session and srun does not."""
_OPTIONS = "HVDTRAIN_"
_OF_THIS_SETUP = {"HVDTRAIN_CACHE", "HVDTRAIN_VENV", LOG_DIR, LAUNCH_ID}


@dataclass(frozen=True)
class EnvVar:
    """One environment variable for all ranks.

    Attributes:
        name: Name of the variable.
        value: Value of the variable. None takes the value from the launcher's environment. It may be
            a secret, so it is not part of `repr`.

    Raises:
        UsageError: The name is invalid or set by the launcher, or the value contains a NUL byte.
    """

    name: str
    value: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Format the variable for `--env`."""
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
    """Return whether `text` is a valid variable name in a shell. The environment may contain other names."""
    return bool(_NAME.fullmatch(text))


def forwarded(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names requested with `--env`, as passed on to the programs of `hvdtrain.start`."""
    return frozenset(filter(None, environ.get(FORWARD, "").split(",")))


def parse_variable(text: str) -> EnvVar:
    """Parse `NAME` or `NAME=VALUE`. Raises UsageError if the variable is invalid."""
    name, equals, value = text.partition("=")
    return EnvVar(name, value if equals else None)


def require_values(names: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError if some of the variables in `names` are not set."""
    if missing := sorted(set(names) - environ.keys()):
        raise UsageError(f"--env {', '.join(missing)}: not set in this environment: set it first")


def travelling(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """Select the variables for ranks on other hosts: those forwarded by default, and those in `asked`."""
    wanted = set(asked)
    return {
        name: value
        for name, value in environ.items()
        # Variables without a valid shell name would be lost in the shells on the way to another host.
        if is_name(name) and (name in wanted or name in NAMES or _is_of_a_run(name))
    }


def into_tasks(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """Select the environment of srun and its tasks: variables for other hosts, of the login session and of Slurm."""
    slurm = (name for name in environ if name.startswith("SLURM"))
    return travelling(environ, [*asked, *_SESSION, *slurm])


def into_container(environ: Mapping[str, str], asked: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the variables for a container: of the libraries, of `hvdtrain run`, and those in `asked`."""
    named = {
        name
        for name in environ
        if is_name(name)
        and name not in _OF_THIS_SETUP
        and (name.startswith(_OPTIONS) or _has_prefix(name, _OF_THE_RUN))
    }
    return tuple(sorted(named | set(asked)))


def acts_at_start(name: str) -> bool:
    """Return whether a variable must be set before a rank's process starts, when Python and the C library read it."""
    return name in NAMES or name.startswith(_AT_START)


def _is_of_a_run(name: str) -> bool:
    return _has_prefix(name, _OF_THE_RUN + _OF_THE_MACHINE)


def _has_prefix(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether `name` has one of the prefixes and is not Terraform's."""
    return name.startswith(prefixes) and not name.startswith(_OF_TERRAFORM)
