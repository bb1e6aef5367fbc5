"""How Horovod is built for what `build_environment` found: the wheel's key, the environment, the commands. Pure.

With the flags below and the wrapper's edits the build takes two thirds of the processor time (150 s instead of 230 s,
on a machine with other work) and the wheel has 1 MB instead of 16.
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
    # Horovod's CMake files say cmake_minimum_required(2.8) in places, which cmake 4 refuses.
    "cmake==3.31.6",
    # Horovod's setup.py uses setup_requires, which needs the pkg_resources that setuptools 82 removed.
    "setuptools==80.9.0",
    "wheel==0.45.1",
    # Horovod's setup_requires.
    "cloudpickle",
    "packaging",
    "psutil",
    "pyyaml",
)
"""What the build itself uses; it goes to a folder of its own that is deleted afterwards."""

RUNTIME = ("cloudpickle", "packaging", "psutil", "pyyaml", "setuptools")
"""What Horovod imports when it runs. setuptools: horovodrun imports distutils, which Python 3.12 dropped."""

CMAKE_WRAPPER = Path(__file__).with_name("horovod_cmake.py")

FLAGS = (
    # Horovod raises -O2 to -O3 itself; its own default also has -g, which makes the library four times as large.
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
        """Name of the wheel's folder in the cache: two recipes with the same key build the same wheel."""
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
    """The recipe for the running Python."""
    return Recipe(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform().replace("-", "_"),
        survey=survey,
        wrapper_hash=wrapper_hash(CMAKE_WRAPPER.read_bytes(), FLAGS),
    )


def wrapper_hash(wrapper: bytes, flags: tuple[str, ...]) -> str:
    """Identifies the edits of the sources and the compiler flags."""
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
        """The value of HOROVOD_CMAKE: a two-line script around `horovod_cmake.py`."""
        return self.root / "cmake"

    @property
    def requirements(self) -> Path:
        return self.root / "horovod.txt"

    @property
    def nccl(self) -> Path:
        """NCCL with the file names that the linker looks for; a wheel has libnccl.so.2 only."""
        return self.root / "nccl"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the build, so that all files are on one disk and are removed together."""
        return self.root / "tmp"


def cmake_arguments(recipe: Recipe, horovod_folder: Path) -> tuple[str, ...]:
    """What the wrapper adds when cmake configures. `horovod_folder` is where horovod/tensorflow will lie."""
    arguments = list(FLAGS)
    mpi, cuda = recipe.survey.mpi, recipe.survey.cuda
    if mpi:
        arguments.append(f"-DMPI_CXX_COMPILER={mpi.mpicxx}")
    # The wheel outlives this environment: its libraries are found from its own place, not by this absolute path.
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
    """Text of `workspace.cmake`."""
    cmake = workspace.tools / "cmake/data/bin/cmake"
    argv = [sys.executable, str(CMAKE_WRAPPER), str(cmake)]
    argv += cmake_arguments(recipe, horovod_folder)
    return f'#!/bin/sh\nexec {shlex.join(argv)} -- "$@"\n'


def horovod_settings(recipe: Recipe, workspace: Workspace) -> dict[str, str]:
    """The HOROVOD_ variables of the build."""
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
    """`base` with what the build needs; the caller's own HOROVOD_ variables are not in the key, so they go."""
    kept = {name: value for name, value in base.items() if not name.startswith("HOROVOD_")}
    path = [base.get("PATH", os.defpath)]
    if recipe.survey.mpi:
        # Gloo looks for MPI's C compiler itself, and silently leaves out its MPI part without one.
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
    """The command of this environment's pip."""
    return [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]


def tools_command(workspace: Workspace) -> list[str]:
    """Installs the build tools into the workspace."""
    return pip("install", "--only-binary=:all:", "--target", str(workspace.tools), *TOOLS)


def wheel_command(workspace: Workspace) -> list[str]:
    """Builds the wheel.

    Without isolation, because the build asks the installed TensorFlow for its headers; without pip's own cache,
    because that knows wheels by name and version only and would mix up CPU and GPU builds.
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
    """Installs Horovod's dependencies."""
    return pip("install", *RUNTIME)


def install_command(wheel: Path) -> list[str]:
    """Replaces another build of the same version, which pip would otherwise take for the same thing."""
    return pip("install", "--no-deps", "--force-reinstall", str(wheel))


def uninstall_command() -> list[str]:
    """Removes Horovod from this environment."""
    return pip("uninstall", "--yes", "horovod")
