"""Scaling: N ranks of one core each against plain Keras on one core, in turn, in one run.

These machines are shared and their speed drifts, so the two are timed one after the other in each pass, the
ratio is taken within a pass, and the median of the passes counts. Scaling is
(examples a second of N ranks) / (N x examples a second of one plain process): 1 is perfect.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import EngineError

ROUNDS = 5
REPORT = '{"examples_per_second"'
"""How rank 0's report begins; see throughput.py."""

TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Pass:
    """Examples a second in one pass: plain Keras on one core, and all ranks together."""

    plain: float
    ranks: float
    size: int

    @property
    def scaling(self) -> float:
        """Part of the perfect speed-up that was reached."""
        return self.ranks / (self.size * self.plain)


SCRIPT = Path(__file__).with_name("throughput.py")


def timing_arguments(way: str, model: str, batch_size: int) -> tuple[str, ...]:
    """Return the arguments of throughput.py."""
    return (way, f"--model={model}", f"--batch-size={batch_size}", f"--rounds={ROUNDS}")


def measure(
    model: str,
    batch_size: int,
    way: str,
    passes: int,
    launch: Callable[[Path, tuple[str, ...]], list[str]],
) -> Iterator[Pass]:
    """Yield `passes` pairs of timings.

    Args:
        model: name of a network in bench.models.
        batch_size: examples a rank.
        way: "keras", "trainer" or "bare"; see throughput.py.
        passes: how many pairs.
        launch: composes the argv that runs a script with its arguments on all ranks.
    """
    alone = [sys.executable, str(SCRIPT), *timing_arguments("plain", model, batch_size)]
    together = launch(SCRIPT, timing_arguments(way, model, batch_size))
    for _ in range(passes):
        plain, _ = _run(alone)
        ranks, size = _run(together)
        yield Pass(plain, ranks, size)


def _run(argv: list[str]) -> tuple[float, int]:
    """Return the median examples a second that rank 0 reports, and the number of ranks."""
    report = run_timing(argv, REPORT)
    return statistics.median(report["examples_per_second"]), report["size"]


def run_timing(argv: list[str], beginning: str) -> dict[str, Any]:
    """Run a timing, a thread a rank; return rank 0's report, a line of JSON with this `beginning`."""
    # TensorFlow's noise is not what the reader of a figure looks for.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    begin = done.stdout.find(beginning)
    if done.returncode or begin < 0:
        last = "\n".join(done.stderr.splitlines()[-15:])
        raise EngineError(
            f"The timing failed (exit code {done.returncode}): {' '.join(argv)}\n{last}"
        )
    # mpirun may put a tag behind the line's end.
    report, _ = json.JSONDecoder().raw_decode(done.stdout, begin)
    return dict(report)
