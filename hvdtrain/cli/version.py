"""`hvdtrain --version`: collect what a bug report needs, in well under a second and without importing TensorFlow.

Everything is read from the packages' metadata, except MPI and GPUs, whose programs are called with a short time limit.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping

from hvdtrain import __version__
from hvdtrain.doctor.checks import Result
from hvdtrain.doctor.horovod_checks import list_gpus
from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.install.build import installed_key
from hvdtrain.install.build_environment import parse_mpirun_version, version_of
from hvdtrain.launch.installed_horovod import find_mpirun, installed_controllers
from hvdtrain.launch.running.timed_command import run

ASK_SECONDS = 3.0
_MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}


def version_text(environ: Mapping[str, str]) -> str:
    """Return lines `name  value`; the first is `hvdtrain X.Y.Z`."""
    rows = list(_rows(environ))
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [f"hvdtrain {__version__}", *(f"{name:<{width}}  {value}" for name, value in rows)]
    )


def _rows(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.system()} {platform.release()} {platform.machine()}, {_libc()}"
    yield "cores", f"{available_cores()} of {os.cpu_count()}"
    yield "TensorFlow", _first_of("tensorflow", "tensorflow-cpu")
    yield "Keras", version_of("keras") or "not installed"
    yield "Horovod", _horovod()
    yield "MPI", _mpi(environ)
    yield "GPUs", _gpus(environ)


def _libc() -> str:
    """Return the version of glibc; other C libraries do not report one."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "no glibc"
    except (ValueError, OSError):
        return "no glibc"


def _first_of(*distributions: str) -> str:
    found = ((name, version_of(name)) for name in distributions)
    return next((f"{version} ({name})" for name, version in found if version), "not installed")


def _horovod() -> str:
    version = version_of("horovod")
    if version is None:
        return "not installed"
    try:
        built = ", ".join(sorted(installed_controllers())) or "no controller"
    except HvdtrainError:
        built = "no TensorFlow library"
    key = installed_key()
    return f"{version} with {built}" + (f" ({key})" if key else "")


def _mpi(environ: Mapping[str, str]) -> str:
    mpirun = find_mpirun(environ.get("PATH"))
    if mpirun is None:
        return "no mpirun in PATH"
    said = run([mpirun, "--version"], limit=ASK_SECONDS, environ=environ)
    identity = parse_mpirun_version(said.text) if said else None
    if identity is None:
        return f"unknown ({mpirun})"
    return f"{_MPI_NAMES[identity[0]]} {identity[1]} ({mpirun})"


def _gpus(environ: Mapping[str, str]) -> str:
    gpus = list_gpus(environ, ASK_SECONDS)
    if isinstance(gpus, Result):
        return gpus.seen
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    wheels = (("CUDA", "nvidia-cuda-runtime-cu12"), ("NCCL", "nvidia-nccl-cu12"))
    libraries = [f"{name} {version}" for name, wheel in wheels if (version := version_of(wheel))]
    return ", ".join([f"{len(gpus)} x {names}", f"driver {gpus[0].driver}", *libraries])
