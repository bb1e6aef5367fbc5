"""What happens in a run, as lines of JSON in its folder: `hvdtrain report` draws them, also while the run goes on.

Each line has "event" and "time" (seconds since 1970), and further fields:

| event | when | fields |
| --- | --- | --- |
| begin | a process begins to train | workers, epochs, steps_per_epoch, examples, host, epoch and step to begin with |
| steps | every second, or less often | epoch, step, seconds, learning_rate, values, steps, examples, slowest |
| epoch | the end of an epoch | epoch, seconds, examples_per_second, learning_rate, values |
| ranks | the same, with several workers | epoch, seconds of every rank in each phase |
| checkpoint | one was written | steps since the beginning, bytes of variables, seconds |
| warning | Python showed one | text |
| end | the training ended | how |

Epochs and steps count from 1. The values of steps are those of rank 0 in the epoch so far, those of an epoch are of all
workers; "slowest" is the seconds of the slowest step. A number that is nan or inf is null.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import HvdtrainError, warn_user

INTERVAL_SECONDS = 1.0
"""Between two events "steps"."""
INTERVAL_SHARE = 1e-3
"""The same, as a share of the time since the beginning: 100 days of training are 13,000 lines."""


class EventLog:
    """Appends to the file once `begin` was called, which only rank 0 does. No disk that is full ends a training.

    Args:
        path: of the file; None: it is never begun.
        keep: called before a line is written; raises OSError if the folder is another run's.
    """

    def __init__(self, path: Path | None = None, keep: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._keep = keep
        self._is_open = self._warned = False
        self._began = 0.0
        self._steps = self._examples = 0
        self._since = self._last = self._slowest = 0.0

    def begin(self, **facts: Any) -> None:
        """Note that the training begins."""
        self._is_open, self._began = True, time.monotonic()
        self.note("begin", **facts)

    def note(self, event: str, **facts: Any) -> None:
        """Write a line."""
        if self._path is None or not self._is_open:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **_plain(facts)}) + "\n"
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
        """Steps follow: what has passed since the last one is not theirs."""
        self._steps = self._examples = 0
        self._slowest = 0.0
        self._since = self._last = time.monotonic()

    def count(
        self, steps: int, examples: int, facts: Callable[[], dict[str, Any]], last: bool = False
    ) -> None:
        """Count steps with their examples, and now and then write them.

        Args:
            steps: that have just been trained.
            examples: in them, of all workers.
            facts: further fields; asked only when they are written, as they may wait for a device.
            last: no other steps follow for now.
        """
        if not self._is_open:
            return
        now = time.monotonic()
        self._steps += steps
        self._examples += examples
        if steps:
            self._slowest = max(self._slowest, (now - self._last) / steps)
        self._last = now
        seconds = now - self._since
        due = max(INTERVAL_SECONDS, INTERVAL_SHARE * (now - self._began))
        if self._steps and (last or seconds >= due):
            counted = {"steps": self._steps, "examples": self._examples, "seconds": seconds}
            self.note("steps", **facts(), **counted, slowest=self._slowest)
            self.begin_steps()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the warnings that are shown in this block, and how it ends."""
        show = warnings.showwarning

        def noting(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            self.note("warning", text=str(message))
            show(message, *args, **kwargs)

        warnings.showwarning = noting
        try:
            yield
        except BaseException as error:
            # The text of another's error may hold anything, also what is secret.
            own = f": {error}" if isinstance(error, HvdtrainError) else ""
            self.note("end", how=f"{type(error).__name__}{own}")
            raise
        else:
            self.note("end", how="finished")
        finally:
            warnings.showwarning = show
            self._is_open = False


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def _plain(value: Any) -> Any:
    """What JSON can hold, with six digits of each number."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(np.mean(value))
    return float(f"{number:.6g}") if math.isfinite(number) else None
