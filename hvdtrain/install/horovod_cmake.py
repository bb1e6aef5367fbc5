"""Replaces cmake while Horovod 0.28.1 is built (HOROVOD_CMAKE), and adapts its sources to today's TensorFlow.

    horovod_cmake.py REAL_CMAKE [EXTRA_ARGUMENT ...] -- ARGUMENT ...

When the first ARGUMENT is Horovod's source folder (the configure step), four edits are made there and the extra
arguments are added; every other call goes to the real cmake as it is. The edits can be made twice without harm.

- The XLA custom calls (xla_mpi_ops.cc) are left out: they include headers that TensorFlow 2.19 and newer do not ship.
- mpi_ops.cc gets its own AsGpuStreamValue: TensorFlow's GPU libraries no longer export it.
- Gloo is compiled once instead of twice: TensorFlow links the C++17 copy only.
- mpi_ops.cc, by far the longest to compile, starts first instead of running alone at the end.

Runs on its own, outside the package: standard library only.
"""

import os
import sys
from pathlib import Path

TENSORFLOW_LISTS = Path("horovod/tensorflow/CMakeLists.txt")
TENSORFLOW_OPS = Path("horovod/tensorflow/mpi_ops.cc")
TOP_LISTS = Path("CMakeLists.txt")

_DECLARATION = "\nGpuStreamHandle AsGpuStreamValue(Stream* stream);\n"
_STATIC_DECLARATION = "\nstatic GpuStreamHandle AsGpuStreamValue(Stream* stream);\n"
_END_OF_GPU_INCLUDES = "#endif // HAVE_GPU\n\n// Undef LOG macro"
_DEFINITION = """\
namespace stream_executor {
namespace gpu {
static GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""
_SOURCES = "SHARED ${SOURCES} ${TF_SOURCES})"
_LONGEST_SOURCE_FIRST = "SHARED ${TF_SOURCES} ${SOURCES})"
_GLOO = "add_subdirectory(third_party/gloo)"
_GLOO_ON_DEMAND = "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)"


def without_xla_calls(cmake_lists: str) -> str:
    """CMake's list without the XLA custom calls."""
    lines = cmake_lists.splitlines(keepends=True)
    return "".join(line for line in lines if "xla_mpi_ops.cc" not in line)


def with_longest_source_first(cmake_lists: str) -> str:
    """CMake's list with mpi_ops.cc in front."""
    return cmake_lists.replace(_SOURCES, _LONGEST_SOURCE_FIRST)


def with_own_stream_value(mpi_ops: str) -> str:
    """mpi_ops.cc with its own AsGpuStreamValue."""
    if _DECLARATION not in mpi_ops:
        return mpi_ops
    declared = mpi_ops.replace(_DECLARATION, _STATIC_DECLARATION)
    return declared.replace(_END_OF_GPU_INCLUDES, _DEFINITION + _END_OF_GPU_INCLUDES)


def with_gloo_on_demand(cmake_lists: str) -> str:
    """CMake's list that compiles Gloo only where it is linked."""
    return cmake_lists.replace(_GLOO, _GLOO_ON_DEMAND)


def prepare(source: Path) -> None:
    """Make the edits in Horovod's source folder."""
    for name, edit in (
        (TENSORFLOW_LISTS, without_xla_calls),
        (TENSORFLOW_LISTS, with_longest_source_first),
        (TENSORFLOW_OPS, with_own_stream_value),
        (TOP_LISTS, with_gloo_on_demand),
    ):
        path = source / name
        before = path.read_text(encoding="utf-8")
        after = edit(before)
        if after != before:
            path.write_text(after, encoding="utf-8")


def main(argv: list[str]) -> None:
    """Edit the sources before the configure step; then become cmake."""
    # `cmake --build . -- VERBOSE=1` has a `--` of its own; the first one is ours.
    end = argv.index("--")
    (cmake, *extra), arguments = argv[:end], argv[end + 1 :]
    if arguments and (Path(arguments[0]) / TENSORFLOW_LISTS).is_file():
        prepare(Path(arguments[0]))
        arguments += extra
    os.execv(cmake, [cmake, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
