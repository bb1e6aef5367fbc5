"""Define how Horovod is built for the result of a survey: the wheel's key, the environment, the commands. Pure.

With the flags below and the wrapper's edits, the build takes two thirds of the processor time (150 s instead of 230 s,
on a busy machine), and the wheel is 1 MB instead of 16.
"""

import hashlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.install.build_environment import Survey

HOROVOD_VERSION = "0.28.1"
HOROVOD_SDIST = (
    f"horovod=={HOROVOD_VERSION} "
    "--hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
)

TOOLS = (
    # Horovod's CMake files contain cmake_minimum_required(2.8), which cmake 4 rejects.
    "cmake==3.31.6",
    # Horovod's setup.py uses setup_requires, which needs the pkg_resources that setuptools 82 removed.
    "setuptools==80.9.0",
    "wheel==0.45.1",
    # From Horovod's setup_requires.
    "cloudpickle",
    "packaging",
    "psutil",
    "pyyaml",
)
"""Tools for the build alone, installed into a folder that is deleted afterwards."""

RUNTIME = ("cloudpickle", "packaging", "psutil", "pyyaml", "setuptools")
"""Packages that Horovod imports at run time. setuptools has distutils for horovodrun, which Python 3.12 dropped."""

CMAKE_WRAPPER = Path(__file__).with_name("horovod_cmake.py")

FLAGS = (
    # Horovod raises -O2 to -O3 itself. Its own default includes -g, which makes the library four times as large.
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the content of the built wheel."""

    python: str
    platform: str
    survey: Survey
    wrapper_hash: str

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache. Recipes with the same key build the same wheel."""
        survey = self.survey
        return "-".join(
            (
                self.python,
                self.platform,
                f"tensorflow{survey.tensorflow.version}",
                survey.mpi.tag if survey.mpi else "gloo",
                survey.cuda.tag if survey.cuda else "cpu",
                f"horovod{HOROVOD_VERSION}",
                self.wrapper_hash[:8],
            )
        )


def recipe_for(survey: Survey) -> Recipe:
    """Return the recipe for the running Python."""
    return Recipe(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform().replace("-", "_"),
        survey=survey,
        wrapper_hash=wrapper_hash(CMAKE_WRAPPER.read_bytes(), FLAGS),
    )


def wrapper_hash(wrapper: bytes, flags: tuple[str, ...]) -> str:
    """Return a hash that identifies the source edits and the compiler flags."""
    return hashlib.sha256(b"\0".join((wrapper, *(flag.encode() for flag in flags)))).hexdigest()


@dataclass(frozen=True)
class Workspace:
    """The temporary folder of one build."""

    root: Path

    @property
    def tools(self) -> Path:
        return self.root / "tools"

    @property
    def cmake(self) -> Path:
        """Value of HOROVOD_CMAKE: a two-line script that calls `horovod_cmake.py`."""
        return self.root / "cmake"

    @property
    def requirements(self) -> Path:
        return self.root / "horovod.txt"

    @property
    def nccl(self) -> Path:
        """NCCL under the file names that the linker looks for; the wheel has only libnccl.so.2."""
        return self.root / "nccl"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the build, so that all files are on one disk and are removed together."""
        return self.root / "tmp"


def cmake_arguments(recipe: Recipe, horovod_folder: Path) -> tuple[str, ...]:
    """Return what the wrapper adds when cmake configures.

    Args:
        recipe: Recipe of the build.
        horovod_folder: Folder where horovod/tensorflow will be installed.
    """
    arguments = list(FLAGS)
    mpi, cuda = recipe.survey.mpi, recipe.survey.cuda
    if mpi:
        arguments.append(f"-DMPI_CXX_COMPILER={mpi.mpicxx}")
    # The wheel outlives this environment, so its libraries are found relative to its own location.
    origins = []
    if mpi and mpi.library:
        origins.append(f"$ORIGIN/{os.path.relpath(mpi.library, horovod_folder)}")
    if cuda and cuda.nccl_is_wheel:
        origins.append(f"$ORIGIN/{os.path.relpath(cuda.nccl_home / 'lib', horovod_folder)}")
    if origins:
        arguments.append("-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON")
        arguments.append(f"-DCMAKE_INSTALL_RPATH={';'.join(origins)}")
        if mpi and mpi.library is None:
            arguments.append("-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON")
    return tuple(arguments)


def cmake_launcher(recipe: Recipe, workspace: Workspace, horovod_folder: Path) -> str:
    """Return the content of `workspace.cmake`."""
    cmake = workspace.tools / "cmake/data/bin/cmake"
    argv = [sys.executable, str(CMAKE_WRAPPER), str(cmake)]
    argv += cmake_arguments(recipe, horovod_folder)
    return f'#!/bin/sh\nexec {shlex.join(argv)} -- "$@"\n'


def horovod_settings(recipe: Recipe, workspace: Workspace) -> dict[str, str]:
    """Return the HOROVOD_ variables of the build."""
    settings = {
        "HOROVOD_CMAKE": str(workspace.cmake),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if recipe.survey.mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    cuda = recipe.survey.cuda
    if cuda:
        settings |= {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(cuda.home),
            "HOROVOD_NCCL_HOME": str(workspace.nccl if cuda.nccl_is_wheel else cuda.nccl_home),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_BUILD_CUDA_CC_LIST": cuda.architectures,
            "CUDAToolkit_ROOT": str(cuda.home),
            "CUDACXX": str(cuda.home / "bin/nvcc"),
        }
    return settings


def build_environment(
    recipe: Recipe, workspace: Workspace, base: Mapping[str, str], jobs: int
) -> dict[str, str]:
    """Return `base` with the build's variables, without the user's HOROVOD_ variables, which the key does not cover."""
    kept = {name: value for name, value in base.items() if not name.startswith("HOROVOD_")}
    path = [base.get("PATH", os.defpath)]
    if recipe.survey.mpi:
        # Gloo itself looks for MPI's C compiler, and silently omits its MPI support without one.
        path.insert(0, str(recipe.survey.mpi.mpicxx.parent))
    if recipe.survey.cuda:
        path.insert(0, str(recipe.survey.cuda.home / "bin"))
    python_path = [str(workspace.tools), *filter(None, [base.get("PYTHONPATH")])]
    return {
        **kept,
        "MAKEFLAGS": base.get("MAKEFLAGS") or f"-j{jobs}",
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(python_path),
        "TMPDIR": str(workspace.temporary),
        **horovod_settings(recipe, workspace),
    }


def pip(*arguments: str) -> list[str]:
    """Return a command of this environment's pip."""
    return [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]


def tools_command(workspace: Workspace) -> list[str]:
    """Return the command that installs the build tools into the workspace."""
    return pip("install", "--only-binary=:all:", "--target", str(workspace.tools), *TOOLS)


def wheel_command(workspace: Workspace) -> list[str]:
    """Return the command that builds the wheel.

    It runs without isolation, because the build reads the headers of the installed TensorFlow, and without pip's own
    cache, which identifies wheels by name and version only and would mix up CPU and GPU builds.
    """
    return pip(
        "wheel",
        "--verbose",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "--no-binary=horovod",
        "--require-hashes",
        f"--requirement={workspace.requirements}",
        f"--wheel-dir={workspace.wheels}",
    )


def runtime_command() -> list[str]:
    """Return the command that installs Horovod's dependencies."""
    return pip("install", *RUNTIME)


def install_command(wheel: Path) -> list[str]:
    """Return the command that installs the wheel, even over another build of the same version."""
    return pip("install", "--no-deps", "--force-reinstall", str(wheel))


def uninstall_command() -> list[str]:
    """Return the command that removes Horovod from this environment."""
    return pip("uninstall", "--yes", "horovod")
