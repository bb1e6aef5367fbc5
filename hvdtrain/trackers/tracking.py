"""Passes the events of a Trainer's fits to its trackers.

Each tracker has a thread of its own: a server that does not answer, or a full disk, delays no step. Its calls wait for
it and are repeated; the user is warned once. The end of a fit waits END_SECONDS for all trackers together.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError, did_you_mean, warn_user
from hvdtrain.replaced_files import replacing
from hvdtrain.trackers.mlflow import MLflow
from hvdtrain.trackers.tensorboard import TensorBoard
from hvdtrain.trackers.tracker import RunFacts, Tracker
from hvdtrain.trackers.wandb import WandB

END_SECONDS = 10.0
"""Maximum time that the end of a fit waits for its trackers."""
RETRY_SECONDS = 30.0
"""Time before a failed call is repeated."""
IDS = "trackers.json"
KNOWN: dict[str, Callable[[], Tracker]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
STATUS = {
    "finished": "finished",
    **dict.fromkeys(("KeyboardInterrupt", "Preempted", "WorkersChanged"), "interrupted"),
}
"""Status of a run, by how it ended; "failed" if by another exception."""


class Tracking:
    """The trackers of one Trainer; rank 0's are called.

    Args:
        trackers: Trackers, or names of KNOWN, which stand for trackers with their defaults.
        run_dir: Folder of the run, which keeps the trackers' ids for it.

    Raises:
        UsageError: If a name is not known, a package is missing, something is no tracker, or two trackers are of one
            class.
    """

    def __init__(
        self, trackers: str | Tracker | Sequence[str | Tracker] | None, run_dir: str | Path | None
    ) -> None:
        if trackers is None:
            trackers = ()
        if isinstance(trackers, str) or not isinstance(trackers, Sequence):
            trackers = [trackers]
        self._trackers = {type(one).__name__: one for one in map(_tracker, trackers)}
        if len(self._trackers) < len(trackers):
            raise UsageError(f"trackers={trackers!r}: pass at most one of each class")
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._ids: dict[str, str] = {}  # Kept here as well: there may be no run_dir.
        self._writing = threading.Lock()
        self._feeds: list[_Feed] = []
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def begin(self, config: Mapping[str, Any], host: str, step: int) -> None:
        """Start the trackers, after `step` steps of the run."""
        self._step = max(self._step, step)  # A second fit without initial_epoch continues.
        self._feeds = [
            _Feed(name, tracker, partial(self._start, name, tracker, config, host))
            for name, tracker in self._trackers.items()
        ]

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Pass on an event of the run's EventLog, if it is one for trackers."""
        if event == "steps":
            self._step += facts["steps"]
            speed = {"examples_per_second": facts["examples"] / facts["seconds"]}
            values = {**facts["values"], **speed, "learning_rate": facts["learning_rate"]}
            self._log({f"step/{name}": value for name, value in values.items()})
        elif event == "epoch":
            more = ("epoch", "seconds", "examples_per_second", "learning_rate")
            self._log({**facts["values"], **{name: facts[name] for name in more}})
        elif event == "end":
            self._end(STATUS.get(facts["how"].partition(":")[0], "failed"))

    def _log(self, values: Mapping[str, Any]) -> None:
        # A model without an optimizer has no learning rate.
        known = {name: value for name, value in values.items() if value is not None}
        numbers = {name: float(np.mean(value)) for name, value in known.items()}
        for feed in self._feeds:
            feed.put(partial(feed.tracker.log, numbers, self._step))

    def _start(self, name: str, tracker: Tracker, config: Mapping[str, Any], host: str) -> None:
        """Start a tracker in its thread, with the id that it had in this run before."""
        with self._writing:
            if self._run_dir is not None and (self._run_dir / IDS).exists():
                self._ids = json.loads((self._run_dir / IDS).read_text()) | self._ids
        found = tracker.start(RunFacts(self._run_dir, self._ids.get(name), config, host))
        if found is not None:
            with self._writing:
                self._ids[name] = found
                if self._run_dir is not None:
                    with replacing(self._run_dir / IDS) as file:
                        file.write_text(json.dumps(self._ids, indent=2) + "\n")

    def _end(self, status: str) -> None:
        until = time.monotonic() + END_SECONDS
        for feed in self._feeds:
            feed.close(partial(feed.tracker.end, status))
        for feed in self._feeds:
            feed.join(until)


class _Feed:
    """Calls one tracker, from a thread."""

    def __init__(self, name: str, tracker: Tracker, start: Callable[[], None]) -> None:
        self.tracker = tracker
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls.put(start)
        self._closed = threading.Event()
        self._problem: str | None = None
        self._warned = False
        # A daemon: the process ends although a server does not answer.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Add a call; warn if an earlier one failed."""
        self._calls.put(call)
        self._warn()

    def close(self, end: Callable[[], None]) -> None:
        """Add the last call. From now on no failed call is repeated more than once."""
        self._calls.put(end)
        self._calls.put(None)
        self._closed.set()

    def join(self, until: float) -> None:
        """Wait for the calls, at most until a time of time.monotonic."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"no answer within {END_SECONDS:.0f} s of the end"
        self._warn()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            while True:
                try:
                    call()
                    break
                except Exception as error:  # Each package raises its own exceptions.
                    message = f"{type(error).__name__}: {error}"
                    self._problem = message.partition("\n")[0].rstrip(".")
                if self._closed.is_set():
                    return
                self._closed.wait(RETRY_SECONDS)

    def _warn(self) -> None:
        """Warn once, in the main thread: Python's warnings and the event log are not for several."""
        if self._problem is not None and not self._warned:
            self._warned = True
            warn_user(
                f"{self._name}: {self._problem}. It may lack some values of this run; training is not affected"
            )


def _tracker(given: str | Tracker) -> Tracker:
    if not isinstance(given, str):
        if isinstance(given, type) or not isinstance(given, Tracker):
            raise UsageError(
                f"trackers={given!r}: pass names, or objects with the methods of"
                f" hvdtrain.trackers.Tracker"
            )
        return given
    if given not in KNOWN:
        names = ", ".join(map(repr, KNOWN))
        raise UsageError(f"trackers={given!r}: choose from {names}.{did_you_mean(given, KNOWN)}")
    return KNOWN[given]()
