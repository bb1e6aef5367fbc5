"""Locate the Horovod installed for this Python, and find which controllers it was built with.

Horovod itself reports its controllers only after importing TensorFlow, which takes seconds. Its
extension library shows them too: with MPI it links an MPI library, with Gloo it contains Gloo's
classes.
"""

import importlib.util
import mmap
import shutil
import sys
from pathlib import Path
from typing import Literal

from hvdtrain.errors import EngineError, UsageError

Controller = Literal["mpi", "gloo"]
INSTALL_HINT = "run: hvdtrain install-horovod"
_SIGNS: dict[Controller, tuple[bytes, ...]] = {
    "mpi": (b"libmpi.so", b"libmpich.so", b"libmpi_ibm.so"),
    "gloo": (b"GlooController",),
}


def installed_controllers() -> frozenset[Controller]:
    """Return the controllers of this Python's Horovod. Raises EngineError if there is no Horovod for TensorFlow."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(f"Horovod is not installed for {sys.executable}: {INSTALL_HINT}")
    package = Path(spec.submodule_search_locations[0])
    extension = next(iter(sorted(package.glob("tensorflow/mpi_lib.*so"))), None)
    if extension is None:
        raise EngineError(f"the Horovod in {package} was built without TensorFlow: {INSTALL_HINT}")
    return built_controllers(extension)


def built_controllers(extension: Path) -> frozenset[Controller]:
    """Return which controllers a Horovod extension library contains."""
    with (
        extension.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return frozenset(
            controller
            for controller, signs in _SIGNS.items()
            if any(content.find(sign) >= 0 for sign in signs)
        )


def find_mpirun(path: str | None = None) -> str | None:
    """Find mpirun in PATH, else next to this Python, for an environment that is not activated."""
    return shutil.which("mpirun", path=path) or shutil.which(
        "mpirun", path=str(Path(sys.executable).parent)
    )


def choose_controller(wanted: str, built: frozenset[Controller], mpirun: str | None) -> Controller:
    """Choose the controller. `auto` prefers MPI, the faster one, if Horovod was built with it and mpirun exists.

    Raises:
        UsageError: The requested controller cannot be used here.
        EngineError: With `auto`, neither can be used.
    """
    if wanted == "auto":
        if "mpi" in built and mpirun:
            return "mpi"
        if "gloo" in built:
            return "gloo"
        raise EngineError(
            "this Horovod can use neither Gloo (not built) nor MPI "
            f"({'there is no mpirun in PATH' if 'mpi' in built else 'not built'}): {INSTALL_HINT}"
        )
    if wanted not in built:
        have = ", ".join(sorted(built)) or "none"
        raise UsageError(
            f"this Horovod was built without the controller {wanted!r} (built: {have}): "
            f"choose another --controller, or rebuild it: {INSTALL_HINT}"
        )
    if wanted == "mpi" and not mpirun:
        raise UsageError("there is no mpirun in PATH: load your MPI, or use --controller gloo")
    return wanted
