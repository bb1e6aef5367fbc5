"""Writes the events of a run to events.jsonl, one JSON object per line, for `hvdtrain report`.

Each line has "event", "time" (seconds since 1970) and further fields:

| event | when | fields |
| --- | --- | --- |
| begin | a process begins to train | workers, epochs, steps_per_epoch, examples, host, first epoch and step |
| steps | every second, or less often | epoch, step, seconds, learning_rate, values, steps, examples, slowest, memory |
| validation | the first step of a validation, and as often as steps | step |
| epoch | the end of an epoch | epoch, seconds, examples_per_second, learning_rate, values |
| ranks | the same, with several workers | epoch, seconds of every rank in each phase |
| checkpoint | a checkpoint was written | steps since the beginning, bytes of variables, seconds |
| warning | Python showed a warning | text |
| end | the training ended | how |

Epochs and steps count from 1. The values in "steps" are rank 0's running means over the epoch, those in "epoch" are
over all workers. "slowest" is the time of the slowest step in seconds, "memory" the bytes in use by rank 0 (host, gpu).
Numbers that are nan or inf are written as null.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import HvdtrainError, warn_user
from hvdtrain.event_intervals import interval


class EventLog:
    """Appends events to a file, and shows them, after `begin`, which only rank 0 calls.

    A file that cannot be written, for instance on a full disk, never ends a training: the user is warned once.

    Args:
        path: Path of the file; None: write nothing.
        keep: Function called before each line; raises OSError if the folder now belongs to another run.
    """

    def __init__(self, path: Path | None = None, keep: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._keep = keep
        self._is_open = self._warned = False
        self._show: Callable[[Mapping[str, Any]], None] | None = None
        self._track: Callable[[str, Mapping[str, Any]], None] | None = None
        self._before: Mapping[str, Any] | None = None  # The logs of the step before.
        self._began = 0.0
        self._steps = self._examples = 0
        self._since = self._last = self._slowest = self._validated = 0.0

    def begin(
        self,
        show: Callable[[Mapping[str, Any]], None] | None,
        track: Callable[[str, Mapping[str, Any]], None] | None = None,
        **facts: Any,
    ) -> None:
        """Start the log with the event "begin".

        Args:
            show: Function called with each event; None: only write them.
            track: Function called with the name of each event and its fields, as they were before rounding.
            facts: Fields of the event.
        """
        self._is_open, self._began = True, time.monotonic()
        self._show, self._track = show, track
        self.note("begin", **facts)

    def note(self, event: str, **facts: Any) -> None:
        """Write and show one event with its fields; do nothing before `begin`."""
        if not self._is_open:
            return
        noted = {"event": event, "time": round(time.time(), 3), **plain(facts)}
        if self._show is not None:
            self._show(noted)
        if self._track is not None:
            self._track(event, facts)
        if self._path is None:
            return
        line = json.dumps(noted) + "\n"
        try:
            self._keep()
            with self._path.open("ab+") as file:
                # A killed run may have left half a line.
                if file.tell() and not _ends_a_line(file):
                    line = f"\n{line}"
                file.write(line.encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn_user(f"{self._path} cannot be written: {error}. Training continues without it")

    def begin_steps(self) -> None:
        """Start timing steps: the time since the last one does not count."""
        self._steps = self._examples = 0
        self._slowest = 0.0
        self._before = None
        self._since = self._last = time.monotonic()

    def count(
        self,
        steps: int,
        examples: int,
        logs: Mapping[str, Any],
        facts: Callable[[], dict[str, Any]],
        last: bool = False,
    ) -> None:
        """Count trained steps, and write a "steps" event when one is due.

        Args:
            steps: Number of steps just trained.
            examples: Number of examples in them, over all workers.
            logs: Logs of the last of these steps. Unless `last`, the event has the logs of the call before: waiting for
                this step would leave the device without work.
            facts: Function that returns further fields; only called for an event.
            last: Whether no other step follows for now; if so, write what has been counted.
        """
        if not self._is_open:
            return
        now = time.monotonic()
        before, self._before = self._before, logs
        self._steps += steps
        self._examples += examples
        if steps:
            self._slowest = max(self._slowest, (now - self._last) / steps)
        self._last = now
        seconds = now - self._since
        if self._steps and (last or seconds >= interval(now - self._began)):
            counted = {"steps": self._steps, "examples": self._examples, "seconds": seconds}
            values = dict(logs if last or before is None else before)
            self.note("steps", **facts(), values=values, **counted, slowest=self._slowest)
            self.begin_steps()

    def validate(self, step: int) -> None:
        """Write a "validation" event after `step` steps of a validation, if it is the first or one is due."""
        now = time.monotonic()
        if step == 1 or now - self._validated >= interval(now - self._began):
            self._validated = now
            self.note("validation", step=step)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the warnings shown in this block, and how the block ends."""
        show = warnings.showwarning

        def noting(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            self.note("warning", text=str(message))
            show(message, *args, **kwargs)

        warnings.showwarning = noting
        try:
            yield
        except BaseException as error:
            # The message of any other exception may contain secrets.
            own = f": {error}" if isinstance(error, HvdtrainError) else ""
            self.note("end", how=f"{type(error).__name__}{own}")
            raise
        else:
            self.note("end", how="finished")
        finally:
            warnings.showwarning = show
            self._is_open, self._show, self._track = False, None, None


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def plain(value: Any) -> Any:
    """Convert `value` to JSON's types: floats with six significant digits, nan and inf as None, arrays as means."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(np.mean(value))
    return float(f"{number:.6g}") if math.isfinite(number) else None
