"""Which environment variables travel to the ranks on other hosts, and which values nobody may read
on the way.

A rank on the launcher's own host inherits the whole environment. To other hosts only the names
below go, and what the user asks for with `--env`: the rest (session, agents, shell) means nothing
there, and horovodrun would show each value in the process list of every host. Values that look
secret never stand in a command line, and are masked wherever one is printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.variables import EnvVar

NAMES = frozenset(
    {
        "PATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",  # An allocator, such as jemalloc.
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
    }
)
PREFIXES = (
    # What a run is made of.
    "HVDTRAIN_",
    "HOROVOD_",
    "PYTHON",
    "LC_",
    # The library, and where it keeps data sets and compiled kernels.
    "TF_",
    "TF2_",
    "XLA_",
    "KERAS_",
    "TFDS_",
    "TFHUB_",
    "ABSL_",
    "GRPC_",
    # The numbers' machinery and its threads.
    "CUDA_",
    "CUDNN_",
    "NVIDIA_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "OPENBLAS_",
    "MALLOC_",
    # The network. mpirun reads what is for itself from its own environment.
    "NCCL_",
    "UCX_",
    "OMPI_MCA_",
    "I_MPI_",
    "FI_",
    "IBV_",
    "GLOO_",
)
_OF_TERRAFORM = ("TF_VAR_", "TF_CLI_")
"""Its prefix is TensorFlow's, and its variables are often secret."""

MASK = "***"

# API_KEY, apiKey, HF_TOKEN and ACCESSTOKEN2 contain one of these words; MONKEY and COMPASS do not.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SECRET_WORD = re.compile(
    r"(?:api|access|auth|private|secret|signing|encryption|session|db|pg)?"
    r"(?:key|token|secret|password|passwd|pwd|passphrase|pass|credential|auth|cookie)s?"
)
# https://user:password@host/...
_URL_WITH_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(r"(?P<head>-{0,2}(?P<name>[A-Za-z_][\w.-]*)=)(?P<value>.*)", re.DOTALL)
# The values of these are paths or public.
_HARMLESS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "ssh-identity-file"})


def travelling(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The variables that ranks on other hosts get: the named set and what was asked for."""
    wanted = set(asked)
    return {
        name: value
        for name, value in environ.items()
        if name in wanted or name in NAMES or is_of(name, PREFIXES)
    }


def is_of(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a variable's name has one of the prefixes, and is no other program's."""
    return name.startswith(prefixes) and not name.startswith(_OF_TERRAFORM)


def looks_secret(name: str, value: str = "") -> bool:
    """Whether the value of a variable or option of this name should not be shown."""
    if name in _HARMLESS:
        return False
    words = (word.lower() for word in _WORD.findall(name))
    return any(map(_SECRET_WORD.fullmatch, words)) or bool(_URL_WITH_PASSWORD.search(value))


def variable_to_pass(variable: EnvVar) -> EnvVar:
    """A secret's value goes into this process's environment, and stays out of the command.

    Raises UsageError for a variable that has no value.
    """
    if variable.value is None and variable.name not in os.environ:
        raise UsageError(
            f"--env {variable.name}: there is no such variable here: set it, or give "
            f"--env {variable.name}=VALUE"
        )
    if variable.value is None or not looks_secret(variable.name, variable.value):
        return variable
    os.environ[variable.name] = variable.value
    return replace(variable, value=None)


def masked(argv: Sequence[str]) -> list[str]:
    """The command to print: secret values in `NAME=VALUE`, `--name=VALUE`, `--name VALUE` and URLs
    are replaced by `***`."""
    shown: list[str] = []
    secret_follows = False
    for argument in argv:
        assignment = _ASSIGNMENT.fullmatch(argument)
        if secret_follows and not argument.startswith("--"):
            shown.append(MASK)
        elif assignment and looks_secret(assignment["name"]):
            shown.append(assignment["head"] + MASK)
        else:
            shown.append(_URL_WITH_PASSWORD.sub(rf"\g<1>{MASK}", argument))
        secret_follows = argument.startswith("--") and not assignment and looks_secret(argument[2:])
    return shown
