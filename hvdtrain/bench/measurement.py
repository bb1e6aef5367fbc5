"""Run a measurement on one process or on all ranks, and read what its rank 0 reports.

Each measurement is a module that is also the script of its ranks. The script's arguments are its options, as a JSON
object, and the file for the report: what ranks print passes through a launcher, which cuts long lines and tags them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import EngineError
from hvdtrain.launch.running.timed_command import run

Launch = Callable[[int, Path, tuple[str, ...]], list[str]]
"""Composes the argv that runs a script with its arguments on that many ranks."""

TIMEOUT_SECONDS = 400
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""Variables with the number of threads of a process."""
ONE_THREAD = {
    **dict.fromkeys(THREADS, "1"),
    # TensorFlow's noise is not what the reader of a figure looks for.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
LINES = 15
"""Of each stream, in the message about a failure."""


@dataclass(frozen=True)
class Comparison:
    """Two figures of one pass, measured one after the other: the machine's speed drifts, their ratio hardly does."""

    reference: float
    measured: float

    @property
    def ratio(self) -> float:
        """`measured` in terms of `reference`."""
        return self.measured / self.reference


def medians(passes: Sequence[Comparison]) -> tuple[float, float, float]:
    """The medians over the passes of the reference, of the measured figure, and of their ratio."""
    median = statistics.median
    return (
        median(one.reference for one in passes),
        median(one.measured for one in passes),
        median(one.ratio for one in passes),
    )


def run_measurement(
    launch: Launch,
    np: int,
    script: Path,
    options: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `script` on `np` ranks of one thread each, and return its report.

    Args:
        options: keyword arguments of the function that the script hands to `report`.
        environment: variables beside those of this process.

    Raises:
        EngineError: it failed, wrote no report, or took longer than TIMEOUT_SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        file = Path(folder, "report.json")
        command = launch(np, script, (json.dumps(options), str(file)))
        environ = {**os.environ, **ONE_THREAD, **(environment or {})}
        done = run(command, limit=TIMEOUT_SECONDS, environ=environ)
        assert done is not None, "this Python has gone"
        if done.returncode is None:
            raise EngineError(
                f"The measurement took longer than {TIMEOUT_SECONDS} s: {' '.join(command)}"
            )
        if done.returncode or not file.exists():
            last = [*done.stdout.splitlines()[-LINES:], *done.stderr.splitlines()[-LINES:]]
            raise EngineError(
                f"The measurement failed (exit code {done.returncode}): {' '.join(command)}\n"
                + "\n".join(last)
            )
        return dict(json.loads(file.read_text()))


def report(measure: Callable[..., dict[str, Any] | None]) -> None:
    """The main function of a script: write what `measure` returns, unless that is None (all ranks but the first)."""
    options, file = sys.argv[1:]
    found = measure(**json.loads(options))
    if found is not None:
        Path(file).write_text(json.dumps(found))


def horovodrun(np: int, controller: str) -> list[str]:
    """Return the words with which plain horovodrun starts a command on `np` ranks over "mpi" or "gloo"."""
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(np), f"--{controller}"]


def take_core(local_rank: int, count: int = 1) -> None:
    """Pin this process to the core of its local rank, or so many from there on, among those that it may use.

    Ranks that are timed would otherwise wander over the cores, and where they happened to be would be measured.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(local_rank + i) % len(cores)] for i in range(count)})
