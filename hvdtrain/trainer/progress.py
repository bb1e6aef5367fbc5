"""Progress output of rank 0: a line per pass over the data, and meanwhile the live view or a line per minute.

A process that was started alone draws the view itself; otherwise `hvdtrain run` draws it, from the events in rank 0's
output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.environment import DRAWN, TERMINAL
from hvdtrain.errors import UsageError
from hvdtrain.runtime import Rank
from hvdtrain.trainer.event_log import plain
from hvdtrain.view.channel import encoded
from hvdtrain.view.live_view import is_drawable
from hvdtrain.view.own_terminal import TerminalView, view_around

LINE_SECONDS = 60.0
"""Time between two lines in a pass, without a view."""
REFRESH_SECONDS = 0.5
"""Minimum time between two "pass" events, with a view."""

Show = Callable[[Mapping[str, Any]], None]


def resolve_verbose(verbose: str | int, rank: Rank) -> int:
    """Return what this rank prints: 0 (nothing), 1 (live view) or 2 (lines). Only rank 0 prints.

    Args:
        verbose: 0, 1, 2 or "auto": the view on a terminal, else lines.
        rank: This process's place in the job.

    Raises:
        UsageError: If `verbose` is anything else.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f"verbose={verbose!r}: choose 'auto', 0, 1 or 2")
    if not rank.is_first:
        return 0
    if verbose == "auto":
        return 1 if _is_drawn_by_launcher() or _has_own_terminal(rank) else 2
    return int(verbose)


@contextmanager
def showing(verbose: int, rank: Rank) -> Iterator[Show | None]:
    """Open the live view for this block.

    Args:
        verbose: What to print; see `resolve_verbose`. With 1 but no terminal, there is no view, and lines are printed.
        rank: This process's place in the job.

    Yields:
        A function that shows an event; None without a view.
    """
    if verbose != 1:
        yield None
    elif _is_drawn_by_launcher():
        stream = sys.stdout

        def pass_on(event: Mapping[str, Any]) -> None:
            stream.write(encoded(event))
            stream.flush()

        yield pass_on
    elif around := view_around():
        yield around.show
    elif _has_own_terminal(rank):
        with TerminalView() as view:
            yield view.show
    else:
        yield None


def _is_drawn_by_launcher() -> bool:
    return DRAWN in os.environ.get(TERMINAL, "") and sys.stdout.isatty()


def _has_own_terminal(rank: Rank) -> bool:
    # mpirun without hvdtrain run gives ranks a pseudo-terminal, and breaks up drawings with its tags.
    return rank.size == 1 and TERMINAL not in os.environ and sys.stdout.isatty() and is_drawable()


class Progress:
    """Displays the progress of one pass over data; examples per second are those of all workers together.

    Args:
        verbose: What to print: 0 for no lines.
        show: Function that shows an event, see `showing`; None without a view.
        title: Title of the pass, such as "Epoch 1/5".
        steps: Number of steps in the pass; None if unknown before its end.
        done: Number of these steps that an earlier process has trained.
        epoch: Number of the epoch, from 1; None outside of a training.
    """

    def __init__(
        self,
        verbose: int,
        show: Show | None,
        title: str,
        steps: int | None,
        done: int = 0,
        epoch: int | None = None,
    ) -> None:
        self._verbose = verbose
        self._show = show
        self._title = title
        self._epoch = epoch
        self._examples = 0
        self._steps = self._first = done
        self._total = steps
        self._start = self._told = time.perf_counter()
        self._seconds: float | None = None
        self._shown: tuple[float, int] = self._start, 0
        self._before: Mapping[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to `stop`, or to now."""
        return time.perf_counter() - self._start if self._seconds is None else self._seconds

    @property
    def examples_per_second(self) -> float:
        """Examples per second of all workers in that time."""
        return self._examples / max(self.seconds, 1e-9)

    def step(self, steps: int, global_examples: int, logs: Mapping[str, Any]) -> None:
        """Count steps; at intervals, show an event or print a line.

        Args:
            steps: Number of steps that have just run.
            global_examples: Number of examples in them, over all workers.
            logs: This rank's running loss and metrics.
        """
        self._steps += steps
        self._examples += global_examples
        # Show the logs of the step before: waiting for this one would leave the device without work.
        before, self._before = self._before, logs
        if self._show is not None:
            now = time.perf_counter()
            if now - self._shown[0] >= REFRESH_SECONDS:
                self._tell(now, before)
        elif self._verbose and time.perf_counter() - self._told >= LINE_SECONDS:
            self._told = time.perf_counter()
            self._print(f"step {self._steps:,}{self._left()}", logs)

    def stop(self) -> None:
        """Stop the clock: validation and callbacks, which follow, do not count."""
        self._seconds = self.seconds

    def end(self, logs: Mapping[str, Any]) -> None:
        """Show the final loss and metrics of the pass, over all workers."""
        self.leave()
        if self._verbose:
            self._print(f"{self.seconds:.1f}s", logs)

    def leave(self) -> None:
        """Show that the pass has ended, without printing its line."""
        if self._show is not None:
            self._tell(time.perf_counter(), self._before, ended=True)

    def _tell(self, now: float, logs: Mapping[str, Any], ended: bool = False) -> None:
        assert self._show is not None
        since, examples = self._shown
        self._shown = now, self._examples
        facts = {
            "title": self._title,
            "epoch": self._epoch,
            "step": self._steps,
            "steps": self._total,
            "examples_per_second": (self._examples - examples) / max(now - since, 1e-9),
            "values": dict(logs),
            "ended": ended,
        }
        self._show({"event": "pass", "time": time.time(), **plain(facts)})

    def _print(self, place: str, logs: Mapping[str, Any]) -> None:
        values = "".join(f"  {name}: {np.mean(value):.4g}" for name, value in logs.items())
        rate = f"{self.examples_per_second:,.0f} examples/s"
        print(f"{self._title}  {place}  {rate}{values}", flush=True)

    def _left(self) -> str:
        """Return the total number of steps and an estimate of the minutes left, as text."""
        if self._total is None:
            return ""
        each = self.seconds / (self._steps - self._first)
        return f"/{self._total:,}, {each * (self._total - self._steps) / 60:.0f} min left"
