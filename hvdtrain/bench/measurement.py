"""Runs a measurement on one process or on several ranks, and reads the report of rank 0.

Each measurement is a module that is also the script of its ranks. Its command-line arguments are its options, as a JSON
object, and the path of the report, or of a socket (see turns.py). The report is a file because launchers cut and tag
long lines of output.
"""

from __future__ import annotations

import itertools
import json
import math
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
"""Function that returns the argv to run a script with its arguments on the given number of ranks."""
TIMEOUT_SECONDS = 400
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""Variables that set the number of threads of a process."""
ONE_THREAD = {
    **dict.fromkeys(THREADS, "1"),
    # Hide TensorFlow's messages.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
MISSED = 0.07
"""Largest probability that `interval` does not contain the median."""
FEWEST = 5
"""Number of values from which on `interval` keeps MISSED."""
NOISY = 0.1
"""Width of the interval, relative to the median, above which a ratio says little."""
LINES = 15
"""Number of lines of each output stream in the message about a failure."""


@dataclass(frozen=True)
class Comparison:
    """Two figures of one pass, measured in turn: their ratio hardly depends on the varying speed of the machine."""

    reference: float
    measured: float

    @property
    def ratio(self) -> float:
        """`measured` / `reference`."""
        return self.measured / self.reference


def medians(passes: Sequence[Comparison]) -> tuple[float, float, float]:
    """Return the medians over the passes of the reference, the measured figure, and their ratio."""
    median = statistics.median
    return (
        median(one.reference for one in passes),
        median(one.measured for one in passes),
        median(one.ratio for one in passes),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds of the median of which five or more `values` are samples, with a probability of at least 93 %.

    They are order statistics, whatever the distribution, if the values are independent (Conover 1999, Practical
    Nonparametric Statistics, section 3.2): the k-th lowest and the k-th highest of n miss the median with a probability
    of twice that of fewer than k heads in n tosses. Of fewer than five values: the lowest and the highest.
    """
    found, count = sorted(values), len(values)
    missed = itertools.accumulate(2 * math.comb(count, heads) / 2**count for heads in range(count))
    k = max(1, sum(chance <= MISSED for chance in missed))
    return found[k - 1], found[-k]


def in_passes(values: Sequence[float]) -> str:
    """Return the median of a ratio over the passes, with its bounds, and whether these are too far apart.

    Fewer than five passes have a range in place of bounds.
    """
    median = statistics.median(values)
    if len(values) == 1:
        return f"{median:.3f}"
    low, high = interval(values)
    kind = "range " if len(values) < FEWEST else ""
    noise = "; too noisy to tell" if high - low > NOISY * median else ""
    return f"{median:.3f} ({kind}{low:.3f} to {high:.3f}{noise})"


def run_measurement(
    launch: Launch,
    np: int,
    script: Path,
    options: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    limit: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Run `script` on ranks of one thread each, and return its report.

    Args:
        launch: See `Launch`.
        np: Number of ranks.
        script: Path of the script, which calls `report`.
        options: Keyword arguments of the function that the script passes to `report`.
        environment: Variables to set besides those of this process.
        limit: Seconds after which the measurement is ended.

    Raises:
        EngineError: If the script failed, wrote no report, or took longer than `limit`.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        file = Path(folder, "report.json")
        run_script(launch, np, script, (json.dumps(options), str(file)), environment, limit)
        if not file.exists():
            raise EngineError(f"The measurement wrote no report: {script.name} {options}")
        return dict(json.loads(file.read_text()))


def run_script(
    launch: Launch,
    np: int,
    script: Path,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    limit: float,
    mark: str = "",
) -> None:
    """Run `script` with its command-line arguments on ranks of one thread each.

    Args:
        launch, np, script, environment, limit: As for `run_measurement`.
        arguments: Command-line arguments.
        mark: As for `timed_command.run`.

    Raises:
        EngineError: The script failed, or took longer than `limit`.
    """
    command = launch(np, script, arguments)
    environ = {**os.environ, **ONE_THREAD, **(environment or {})}
    done = run(command, limit=limit, environ=environ, mark=mark)
    assert done is not None, "this Python has gone"
    if done.returncode is None:
        raise EngineError(f"The measurement took longer than {limit:.0f} s: {' '.join(command)}")
    if done.returncode:
        raise EngineError(
            f"The measurement failed (exit code {done.returncode}): {' '.join(command)}\n"
            f"{done.last_lines(LINES)}"
        )


def report(measure: Callable[..., dict[str, Any] | None]) -> None:
    """Run the measurement of a script, and write its report.

    Args:
        measure: Function that returns the report, or None on all ranks but the first.
    """
    options, file = sys.argv[1:]
    found = measure(**json.loads(options))
    if found is not None:
        Path(file).write_text(json.dumps(found))


def take_core(local_rank: int, count: int = 1) -> None:
    """Pin this thread, and those that it starts later, to `count` cores, among those that the process may use.

    They are the one with the number of the local rank, and those after it. Otherwise timings would depend on how the
    ranks migrate between cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(local_rank + i) % len(cores)] for i in range(count)})
