"""The stand-in for cmake, on a source tree in the shape of Horovod's."""

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.install import horovod_cmake
from hvdtrain.install.recipe import CMAKE_WRAPPER

TOP_LISTS = """\
if (NOT "$ENV{HOROVOD_WITHOUT_GLOO}" STREQUAL "1")
    add_subdirectory(third_party/gloo)
    include_directories(third_party/gloo)
endif()
"""
TENSORFLOW_LISTS = """\
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""
MPI_OPS = """\
#if HAVE_GPU
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
#undef LOG
  auto stream = stream_executor::gpu::AsGpuStreamValue(device_context->stream());
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "horovod source"
    (root / "horovod/tensorflow").mkdir(parents=True)
    (root / "CMakeLists.txt").write_text(TOP_LISTS)
    (root / "horovod/tensorflow/CMakeLists.txt").write_text(TENSORFLOW_LISTS)
    (root / "horovod/tensorflow/mpi_ops.cc").write_text(MPI_OPS)
    return root


@pytest.fixture
def cmake(tmp_path: Path) -> Path:
    """Prints its arguments, one a line."""
    path = tmp_path / "cmake"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def wrapped(cmake: Path, *arguments: str) -> list[str]:
    argv = [sys.executable, str(CMAKE_WRAPPER), str(cmake), "-DA=1 2", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def contents(root: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_configure_edits_the_source_and_adds_arguments(source: Path, cmake: Path) -> None:
    assert wrapped(cmake, "--", str(source), "-DB=3") == [str(source), "-DB=3", "-DA=1 2"]
    assert "xla_mpi_ops" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    lists = (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "SHARED ${TF_SOURCES} ${SOURCES})" in lists
    assert "gloo EXCLUDE_FROM_ALL)" in (source / "CMakeLists.txt").read_text()


def test_second_run_changes_nothing(source: Path, cmake: Path) -> None:
    wrapped(cmake, "--", str(source))
    once = contents(source)
    wrapped(cmake, "--", str(source))
    assert contents(source) == once


def test_build_call_passes_through(tmp_path: Path, cmake: Path) -> None:
    arguments = ["--build", ".", "--config", "RelWithDebInfo", "--", "VERBOSE=1"]
    assert wrapped(cmake, "--", *arguments) == arguments


def test_exit_code_of_cmake_comes_through(cmake: Path) -> None:
    cmake.write_text("#!/bin/sh\nexit 7\n")
    argv = [sys.executable, str(CMAKE_WRAPPER), str(cmake), "--", "--build", "."]
    assert subprocess.run(argv, check=False).returncode == 7


def test_stream_value_is_defined_once_and_before_its_use() -> None:
    edited = horovod_cmake.with_own_stream_value(MPI_OPS)
    assert edited.count("static GpuStreamHandle AsGpuStreamValue(Stream* stream) {") == 1
    assert "\nGpuStreamHandle AsGpuStreamValue(" not in edited
    include, definition, use = (
        edited.index(text)
        for text in ("stream.h", "platform_specific_handle", "device_context->stream")
    )
    assert include < definition < edited.index("#endif // HAVE_GPU") < use
