"""Real ranks in tests: they run cases, and every rank's results come back.

A file `cases/NAME.py` holds functions `case_...()`, which every rank calls; what they return (anything JSON can hold,
and arrays) is what a test looks at:

    @pytest.fixture(scope="module", params=CONTROLLERS)
    def results(request):
        return on_ranks("callbacks", np=2, controller=request.param)

    def test_broadcast(results):
        root, other = results.of("case_broadcast")

`launch` alone runs any command on all ranks, for scripts and for jobs that must fail. As a program this file runs
cases and prints what they return: `launch.py [-np N] [--controller C] NAME [CASE]...`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pool import Kind, Pool, Pools, Ran, end_family

from hvdtrain.launch.launchers.horovodrun import STAND_IN

CONTROLLERS = ("mpi", "gloo")
MPI_OR_SLOW_GLOO = ("mpi", pytest.param("gloo", marks=pytest.mark.slow))
"""For tests that depend little on the controller."""
MPI_OR_GLOO_IN_ALL = ("mpi", pytest.param("gloo", marks=pytest.mark.all_cases))
"""For tests of what is above the collectives, which are tested over both."""
ROOT = Path(__file__).resolve().parents[2]
STALL_SHUTDOWN_SECONDS = 16
ENVIRONMENT = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "8",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN_SECONDS),
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # As root, as in containers, mpirun wants to be told twice.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}
POOLED = {
    # Cases bring their own process sets.
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    # Most of a case is tracing. Horovod's threads take a fourth of the cores from it if they ask each other three
    # times a millisecond, as hvdtrain has them do in a training.
    "HOROVOD_CYCLE_TIME": "3",
    # Ranks may compute for a while what others do not.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    # Gloo counts the time in which they are stopped.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400",
}
"""More environment, of the ranks of a pool."""
READ_AT_START = ("HOROVOD_", "HVDTRAIN_", "OMPI_", "OMP_", "TF_", "CUDA_")
NOISE = ("I0000", "WARNING: All log", "UCX")


@dataclass(frozen=True)
class Launched:
    """A job that has ended."""

    returncode: int
    output: str
    seconds: float


class Results:
    """What the cases of `cases/<name>.py` return on each rank. A case runs when it is first asked for."""

    def __init__(self, name: str, kind: Kind, env: Mapping[str, str], timeout: float) -> None:
        self._name, self._kind, self._env, self._timeout = name, kind, dict(env), timeout
        self._ran: dict[str, Ran] = {}

    def ran(self, case: str) -> Ran:
        """Return what became of `case`."""
        if case not in self._ran:
            job = {"module": self._name, "case": case, "env": self._env}
            self._ran[case] = pools().run(self._kind, job, self._timeout)
        return self._ran[case]

    def of(self, case: str) -> list[Any]:
        """Return what `case` returned on each rank; fail the test if it did not on one."""
        ran = self.ran(case)
        errors = [f"did not end: {ran.broken}" if not f else f.get("error") for f in ran.found]
        if any(errors):
            lines = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
            pytest.fail("\n".join([f"{case} failed", *lines, without_noise(ran.printed)]), False)
        return [one["value"] for one in ran.found]


def on_ranks(
    name: str,
    np: int = 2,
    controller: str = "mpi",
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Results:
    """Return the results of `cases/<name>.py` on `np` ranks, each case whatever became of those before it.

    Args:
        name: of the file, without .py.
        np: number of ranks.
        controller: "mpi" or "gloo".
        env: additional environment. Variables that are read when a process starts get ranks of their own, others are
            set in the session's.
        timeout: seconds until a case is broken off and fails.
    """
    extra = dict(env or {})
    at_start = tuple((k, v) for k, v in sorted(extra.items()) if k.startswith(READ_AT_START))
    return Results(name, Kind(np, controller, at_start), extra, timeout)


def case_names(name: str) -> list[str]:
    """Return the cases that `cases/<name>.py` defines or imports, in their order."""
    tree = ast.parse((Path(__file__).parent / "cases" / f"{name}.py").read_text())
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return [name for name in names if name.startswith("case_")]


@functools.cache
def pools() -> Pools:
    """The session's; conftest.py closes them."""
    return Pools(_start)


def _start(kind: Kind, references: Path) -> Pool:
    environment = _environment(POOLED | dict(kind.variables))
    return Pool(own_launcher(kind.np, kind.controller), kind.np, environment, references)


def without_noise(printed: str) -> str:
    lines = printed.splitlines(True)
    return "".join(line for line in lines if not any(noise in line for noise in NOISE))


def launch(
    command: Sequence[str],
    np: int = 2,
    controller: str = "mpi",
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    horovodrun: bool = False,
) -> Launched:
    """Run `command` on `np` ranks of this machine; fail the test if it outlasts `timeout`.

    Args:
        command: the arguments that each rank runs.
        np: number of ranks.
        controller: "mpi" or "gloo".
        env: additional environment.
        timeout: seconds.
        horovodrun: start with horovodrun over MPI as well. By default MPI ranks start with mpirun,
            which horovodrun turns into after the 6 s in which it finds out what was built.
    """
    arguments = [*launcher(np, controller, horovodrun), *command]
    return run_command(arguments, env=env, timeout=timeout)


def run_command(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 600
) -> Launched:
    """Run `command` once, in the environment of ranks; fail the test if it outlasts `timeout`."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        job = subprocess.Popen(
            command,
            env=_environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            job.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_family(job)
        output.seek(0)
        printed = without_noise(output.read())
    seconds = time.monotonic() - start
    if late:
        pytest.fail(f"still running after {timeout} s:\n{printed}", pytrace=False)
    return Launched(job.returncode, printed, seconds)


def launcher(np: int, controller: str, horovodrun: bool = False) -> list[str]:
    """Return the arguments that start `np` ranks."""
    if controller not in CONTROLLERS:
        raise ValueError(f"controller {controller!r}: use one of {CONTROLLERS}")
    if controller == "gloo" or horovodrun:
        return [program("horovodrun"), f"--{controller}", "-np", str(np), "-H", f"localhost:{np}"]
    # Horovod's own mpirun options for one host.
    options = ["-H", f"localhost:{np}", "-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1"]
    return [program("mpirun"), "-np", str(np), *options, "-mca", "btl", "^openib", "--tag-output"]


def own_launcher(np: int, controller: str) -> list[str]:
    """Return the arguments that start `np` ranks, in a second, and safely if they start Horovod more than once.

    Over Gloo, horovodrun imports TensorFlow first, and its server may tell ranks the addresses of an earlier start.
    """
    command = launcher(np, controller)
    if controller == "gloo":
        return [*STAND_IN, *command[1:]]
    return command


def program(name: str) -> str:
    """Return the path of a program of this environment, or skip the test."""
    here = Path(sys.executable).parent
    path = shutil.which(name, path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    here = Path(sys.executable).parent
    found = {
        k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "HVDTRAIN_"))
    }
    python_path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    path = f"{here}{os.pathsep}{os.environ.get('PATH', '')}"
    return found | ENVIRONMENT | {"PYTHONPATH": python_path, "PATH": path} | dict(extra)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run cases on ranks and print what they return.")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--controller", choices=CONTROLLERS, default="mpi")
    parser.add_argument("name", help="of the file in cases/, without .py")
    parser.add_argument("case", nargs="*", help="default: all of the file")
    given = parser.parse_args()
    results = on_ranks(given.name, given.np, given.controller)
    broken = False
    try:
        for case in given.case or case_names(given.name):
            ran = results.ran(case)
            broken = broken or bool(ran.broken)
            print(without_noise(ran.printed), end="")
            for rank, found in enumerate(ran.found):
                print(f"rank {rank} {case}: {found.get('value', found.get('error', ran.broken))}")
    finally:
        pools().close()
    sys.exit(broken)


if __name__ == "__main__":
    main()
