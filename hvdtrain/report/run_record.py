"""The record of a run, read from the events.jsonl and config.json in its folder.

If a run was killed and trained some steps again, the record holds the later ones. Damaged lines are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.environment import CONFIG, EVENTS
from hvdtrain.errors import UsageError

LIVE_SECONDS = 60.0
"""A run without an end counts as running if its last event is not older than this."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """A moment in a run.

    Attributes:
        step: Number of the last step, from 1, over all epochs.
        seconds: Seconds of training so far, without the time between the processes of a run that was restarted.
        values: Losses and metrics by name; validation's begin with "val_".
    """

    step: int
    seconds: float
    values: Values


@dataclass(frozen=True)
class Window(Point):
    """The end of some consecutive steps; `values` are those of rank 0 over the epoch so far.

    Attributes:
        examples_per_second: Examples per second of all workers, in these steps.
        learning_rate: Learning rate; None if the model has no `optimizer`, such as one with several of its own.
    """

    examples_per_second: float
    learning_rate: float | None


@dataclass(frozen=True)
class Epoch(Point):
    """The end of an epoch; `values` are those of all workers.

    Attributes:
        number: Number of the epoch, from 1.
        ranks: Phase -> seconds of each rank; empty with one worker.
    """

    number: int
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Occurrence:
    """A single event, such as a warning.

    Attributes:
        clock: Time in seconds since 1970.
        step: Number of the last step before it; see Point.
        what: Kind of event, such as "resumed".
        text: Description.
    """

    clock: float
    step: int
    what: str
    text: str


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Attributes:
        name: Name of its folder.
        config: Content of config.json; empty if that cannot be read.
        workers: Number of workers in the last process.
        epochs_planned: Number of epochs that the last process was to reach.
        windows: Windows of steps, in order.
        epochs: Ends of epochs, in order.
        occurrences: Other events, in order.
        checkpoints: Number of checkpoints written.
        end: How the run ended; empty if it has not.
        is_live: Whether the run has not ended, and wrote an event in the last LIVE_SECONDS.
    """

    name: str
    config: Mapping[str, Any]
    workers: int
    epochs_planned: int
    windows: Sequence[Window]
    epochs: Sequence[Epoch]
    occurrences: Sequence[Occurrence]
    checkpoints: int
    end: str
    is_live: bool

    @property
    def points(self) -> Sequence[Point]:
        """All windows and epochs."""
        return [*self.windows, *self.epochs]

    @property
    def steps(self) -> int:
        """Number of steps trained so far."""
        return max((point.step for point in self.points), default=0)

    @property
    def seconds(self) -> float:
        """Seconds of training so far; see Point."""
        return max((point.seconds for point in self.points), default=0.0)

    @property
    def state(self) -> str:
        """How the run ended, or whether it is running."""
        if self.end:
            return self.end
        return "running" if self.is_live else "ended without a word (killed?)"

    def metrics(self) -> list[str]:
        """Return the names of losses and metrics, without those of validation; "loss" first."""
        names = dict.fromkeys(
            name.removeprefix("val_") for one in self.points for name in one.values
        )
        return sorted(names, key=lambda name: name != "loss")


def read_run(folder: Path, now: float | None = None) -> RunRecord:
    """Read the record of a run.

    Args:
        folder: A Trainer's run_dir.
        now: Present time in seconds since 1970; None: ask the clock.

    Raises:
        UsageError: If the folder holds no events.
    """
    path = folder / EVENTS
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(
            f"{folder} holds no run: {EVENTS} cannot be read ({error.strerror or error}). Name a folder that a Trainer "
            "got as run_dir"
        ) from error
    reader = _Reader()
    for event in _events(lines):
        reader.take(event)
    if not reader.workers:
        raise UsageError(f"{path} holds no event: has the training begun?")
    now = time.time() if now is None else now
    return RunRecord(
        name=folder.resolve().name,
        config=_config(folder / CONFIG),
        workers=reader.workers,
        epochs_planned=reader.epochs_planned,
        windows=reader.windows,
        epochs=list(reader.epochs.values()),
        occurrences=reader.occurrences,
        checkpoints=reader.checkpoints,
        end=reader.end,
        is_live=not reader.end and now - reader.clock < LIVE_SECONDS,
    )


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), int | float):
            yield event


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Reader:
    """Collects the events of a run, in order, into the fields of a RunRecord.

    Attributes:
        epochs: Ends of epochs by number.
        clock: Time of the last event, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.epochs: dict[int, Epoch] = {}
        self.occurrences: list[Occurrence] = []
        self.workers = self.epochs_planned = self.checkpoints = 0
        self.end = ""
        self.clock = 0.0
        self._began = 0.0
        self._before = 0.0  # Seconds of training in earlier processes.
        self._steps_before: dict[int, int] = {}  # Number of an epoch -> steps before it.
        self._takers = {
            "begin": self._begin,
            "steps": self._steps,
            "epoch": self._epoch,
            "ranks": self._ranks,
            "checkpoint": self._checkpoint,
            "warning": self._warning,
            "end": self._end,
        }

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one event; an event with missing fields is ignored."""
        clock = float(event["time"])
        try:
            take = self._takers.get(event.get("event", ""))
            if take is not None:
                take(event, clock)
        except (AttributeError, KeyError, TypeError, ValueError):
            return
        self.clock = max(self.clock, clock)

    def _begin(self, event: Mapping[str, Any], clock: float) -> None:
        workers, epochs = int(event["workers"]), int(event["epochs"])
        epoch, step = int(event["epoch"]), int(event["step"])
        if self.workers:
            self._before += max(0.0, self.clock - self._began)
            with_workers = f"{workers} workers" if workers != 1 else "1 worker"
            told = f"in epoch {epoch}, at step {step} of it, with {with_workers}"
            self._happened(clock, "resumed" if epoch > 1 or step > 1 else "started again", told)
        self._began, self.workers, self.epochs_planned = clock, workers, epochs
        self.end = ""
        # Steps after the checkpoint are trained again.
        kept = self._before_epoch(epoch) + step - 1
        self.windows = [window for window in self.windows if window.step <= kept]
        self.epochs = {n: one for n, one in self.epochs.items() if n < epoch}
        self._steps_before = {n: steps for n, steps in self._steps_before.items() if n <= epoch}

    def _steps(self, event: Mapping[str, Any], clock: float) -> None:
        seconds, rate = float(event["seconds"]), event.get("learning_rate")
        self.windows.append(
            Window(
                step=self._before_epoch(int(event["epoch"])) + int(event["step"]),
                seconds=self._at(clock),
                examples_per_second=float(event["examples"]) / max(seconds, 1e-9),
                learning_rate=None if rate is None else float(rate),
                values=_numbers(event["values"]),
            )
        )

    def _epoch(self, event: Mapping[str, Any], clock: float) -> None:
        number = int(event["epoch"])
        values, step = _numbers(event["values"]), self._last_step()
        self.epochs[number] = Epoch(step, self._at(clock), values, number)

    def _ranks(self, event: Mapping[str, Any], clock: float) -> None:
        found = self.epochs[int(event["epoch"])]
        phases = {name: one for name, one in event.items() if isinstance(one, list)}
        ranks = {name: [float(seconds) for seconds in one] for name, one in phases.items()}
        self.epochs[found.number] = replace(found, ranks=ranks)

    def _checkpoint(self, event: Mapping[str, Any], clock: float) -> None:
        self.checkpoints += 1

    def _warning(self, event: Mapping[str, Any], clock: float) -> None:
        self._happened(clock, "warning", str(event["text"]))

    def _end(self, event: Mapping[str, Any], clock: float) -> None:
        self.end = str(event["how"])
        self._happened(clock, "end", self.end)

    def _happened(self, clock: float, what: str, text: str) -> None:
        self.occurrences.append(Occurrence(clock, self._last_step(), what, text))

    def _at(self, clock: float) -> float:
        return self._before + clock - self._began

    def _before_epoch(self, number: int) -> int:
        """Return the number of steps before an epoch; epochs may differ in length."""
        return self._steps_before.setdefault(number, self._last_step())

    def _last_step(self) -> int:
        return self.windows[-1].step if self.windows else 0


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers; nan and inf were written as null."""
    return {name: float(one) for name, one in values.items() if isinstance(one, int | float)}
