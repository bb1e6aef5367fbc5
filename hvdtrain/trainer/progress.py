"""Rank 0's display of progress: Keras's progress bar, or a line per epoch and minute, with examples per second."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import keras
import numpy as np

from hvdtrain.environment import TERMINAL
from hvdtrain.errors import UsageError
from hvdtrain.runtime import Rank

LINE_SECONDS = 60.0
"""Time between two lines within an epoch, without a progress bar."""


def resolve_verbose(verbose: str | int, rank: Rank) -> int:
    """Return what this rank prints: 0 (nothing), 1 (progress bar) or 2 (lines). Only rank 0 prints.

    Args:
        verbose: 0, 1, 2 or "auto": a bar on a terminal, else lines.
        rank: This process's place in the job.

    Raises:
        UsageError: If `verbose` is anything else.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f"verbose={verbose!r}: choose 'auto', 0, 1 or 2")
    if not rank.is_first:
        return 0
    if verbose == "auto":
        # Bare mpirun gives ranks a pseudo-terminal, but its tags in the output break bars.
        drawn = rank.size == 1 or TERMINAL in os.environ
        return 1 if drawn and sys.stdout.isatty() else 2
    return int(verbose)


class Progress:
    """Displays the progress of one pass over data; examples per second are those of all workers together.

    Args:
        verbose: What to print: 0, 1 or 2; see `resolve_verbose`.
        title: Title of the pass, such as "Epoch 1/5".
        steps: Number of steps in the pass; None if unknown before its end.
        done: Number of these steps that an earlier process has trained.
    """

    def __init__(self, verbose: int, title: str, steps: int | None, done: int = 0) -> None:
        self._verbose = verbose
        self._title = title
        self._examples = 0
        self._steps = self._first = done
        self._total = steps
        self._bar: Any = None
        self._start = self._told = time.perf_counter()
        self._seconds: float | None = None
        if verbose == 1:
            print(title)
            self._bar = keras.utils.Progbar(steps, unit_name="step", stateful_metrics=None)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to `stop`, or until now."""
        return time.perf_counter() - self._start if self._seconds is None else self._seconds

    @property
    def examples_per_second(self) -> float:
        """Examples per second of all workers in that time."""
        return self._examples / max(self.seconds, 1e-9)

    def step(self, steps: int, global_examples: int, logs: dict[str, Any]) -> None:
        """Count steps, and update the bar or, once a minute, print a line.

        Args:
            steps: Number of steps that have just run.
            global_examples: Number of examples in them, over all workers.
            logs: This rank's running loss and metrics.
        """
        self._steps += steps
        self._examples += global_examples
        if self._bar is not None:
            self._show(logs, finalize=False)
        elif self._verbose == 2 and time.perf_counter() - self._told >= LINE_SECONDS:
            self._told = time.perf_counter()
            self._print(f"step {self._steps:,}{self._left()}", logs)

    def stop(self) -> None:
        """Stop the clock: validation and callbacks, which follow, do not count."""
        self._seconds = self.seconds

    def end(self, logs: dict[str, Any]) -> None:
        """Show the final loss and metrics of the pass, over all workers."""
        if self._bar is not None:
            self._show(logs, finalize=True)
        elif self._verbose == 2:
            self._print(f"{self.seconds:.1f}s", logs)

    def _print(self, place: str, logs: dict[str, Any]) -> None:
        values = "".join(f"  {name}: {np.mean(value):.4g}" for name, value in logs.items())
        rate = f"{self.examples_per_second:,.0f} examples/s"
        print(f"{self._title}  {place}  {rate}{values}", flush=True)

    def _left(self) -> str:
        """Return the total number of steps and an estimate of the minutes left, as text."""
        if self._total is None:
            return ""
        each = self.seconds / (self._steps - self._first)
        return f"/{self._total:,}, {each * (self._total - self._steps) / 60:.0f} min left"

    def _show(self, logs: dict[str, Any], finalize: bool) -> None:
        shown = {**logs, "examples/s": round(self.examples_per_second)}
        self._bar.stateful_metrics = set(shown)
        self._bar.update(
            self._steps, [(k, float(np.mean(v))) for k, v in shown.items()], finalize=finalize
        )
