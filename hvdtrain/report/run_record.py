"""The record of a run, read from the events.jsonl and config.json in its folder, or from events as they happen.

If a run was killed and trained some steps again, the record holds the later ones. Damaged lines are ignored.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.environment import CONFIG, EVENTS
from hvdtrain.errors import UsageError
from hvdtrain.event_intervals import longest_silence

_LATEST = 253_370_764_800  # The year 9999: no clock shows a later one.
OUTSIDE = {"input": "waiting for data", "callbacks": "callbacks", "saving": "saving"}
"""Phase of a worker outside of steps, in which the others wait -> its name in a chart."""


@dataclass(frozen=True)
class Point:
    """A moment in a run.

    Attributes:
        step: Number of the last step, from 1, over all epochs.
        seconds: Seconds of training so far, without the time between the processes of a run that was restarted.
        values: Losses and metrics by name, nan also for inf; validation's begin with "val_".
    """

    step: int
    seconds: float
    values: Mapping[str, float]


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
        ranks: Phase of OUTSIDE, or "seconds" for the whole epoch -> seconds of each rank; empty with one worker.
    """

    number: int
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class PassProgress:
    """The progress of a pass over data.

    Attributes:
        title: Title of the pass, such as "Epoch 1/5".
        epoch: Number of the epoch, from 1; None in evaluation and prediction.
        step: Number of the last step in the pass, from 1.
        steps: Number of steps in the pass; None if not known yet.
        examples_per_second: Recent examples per second of all workers.
        values: Losses and metrics of the pass so far; None for nan and inf.
    """

    title: str
    epoch: int | None
    step: int
    steps: int | None
    examples_per_second: float
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Slowest:
    """The slowest worker in the last epoch: the one that spent the most time outside of training steps.

    Attributes:
        rank: Its rank.
        seconds: Its time outside of steps above that of the median worker.
        share: The same, as a share of the epoch.
        phase: Phase ("input", "callbacks" or "saving") with the largest excess over the median worker.
    """

    rank: int
    seconds: float
    share: float
    phase: str


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
        is_live: Whether the run has not ended, and has not been silent for longer than `longest_silence`.
        clock: Time of the last event, in seconds since 1970, by the clock of the host that wrote it.
        place: PassProgress in the training; None before the first step.
        other_pass: PassProgress in a validation, or in a pass outside of a training; None while it trains.
        seconds_left: Time until the end of the last epoch, at the speed so far; None if not known yet.
        memory: Bytes in use by rank 0, by kind.
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
    clock: float
    place: PassProgress | None
    other_pass: PassProgress | None
    seconds_left: float | None
    memory: Mapping[str, float]

    @property
    def done(self) -> float | None:
        """Share of the training that is done, from 0 to 1; None if the number of steps is not known."""
        return None if self.place is None else _done(self.place, self.epochs_planned)

    @property
    def slowest(self) -> Slowest | None:
        """The slowest worker in the last epoch; None before the first ends, and with one worker."""
        from statistics import median_low  # Takes 10 ms, which a launch need not wait for.

        ranks = next((one.ranks for one in reversed(self.epochs) if one.ranks), None)
        if not ranks:
            return None
        outside = {phase: ranks[phase] for phase in OUTSIDE}
        sums = [sum(each) for each in zip(*outside.values(), strict=True)]
        rank = max(range(len(sums)), key=sums.__getitem__)
        behind = {phase: one[rank] - median_low(one) for phase, one in outside.items()}
        lost = sums[rank] - median_low(sums)
        return Slowest(
            rank, lost, lost / max(*ranks["seconds"], 1e-9), max(behind, key=behind.__getitem__)
        )

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
        return "running" if self.is_live else "ended without notice (killed?)"

    def metrics(self) -> list[str]:
        """Return the names of losses and metrics that were ever finite, without those of validation; "loss" first."""
        names = dict.fromkeys(
            name.removeprefix("val_")
            for one in self.points
            for name, value in one.values.items()
            if math.isfinite(value)
        )
        return sorted(names, key=lambda name: name != "loss")


def read_run(folder: Path, now: float | None = None) -> RunRecord:
    """Read the record of a run.

    Args:
        folder: A Trainer's run_dir.
        now: Present time in seconds since 1970; None: ask the clock.

    Raises:
        UsageError: If events.jsonl cannot be read, or does not show that training has begun.
    """
    path = folder / EVENTS
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        why = f"{folder} contains no run: {EVENTS} cannot be read ({error.strerror or error})"
        why = why if folder.is_dir() else f"no such folder: {folder}"
        raise UsageError(f"{why}. Pass the run_dir of a Trainer") from error
    reader = RunReader(printable(folder.resolve().name), joins=True)
    for event in events_in(lines):
        reader.take(event)
    if not reader.workers:
        raise UsageError(f"{path} contains no events: has the training started?")
    return replace(reader.record(now), config=_config(folder / CONFIG))


def printable(name: str | Path) -> str:
    """Return the name of a file or folder as text that can be written, even if its bytes are no UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def events_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events in lines of JSON; ignore other lines."""
    for line in lines:
        try:
            event = _loaded(line)
        except (ValueError, RecursionError):
            continue
        clock = event.get("time") if isinstance(event, dict) else None
        if isinstance(clock, int | float) and abs(clock) < _LATEST:
            yield event


def _loaded(text: str) -> Any:
    """Return JSON's value, with "?" for halves of surrogate pairs, which a name may hold but no file can."""
    found = json.loads(text)
    if "\\ud" not in text.lower():
        return found
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))


def _config(path: Path) -> dict[str, Any]:
    try:
        found = _loaded(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class RunReader:
    """Builds a RunRecord from the events of a run, given in order.

    Args:
        name: Name of the run.
        joins: Whether another fit, after one that has ended, continues the numbers of its epochs: its log is of one
            Trainer.

    Attributes:
        epochs: Ends of epochs by number. Other attributes are those of RunRecord.
    """

    def __init__(self, name: str = "", joins: bool = False) -> None:
        self.name = name
        self._joins = joins
        self._epochs_before = 0  # Number of epochs of earlier fits.
        self.place: PassProgress | None = None
        self.other_pass: PassProgress | None = None
        self.memory: Mapping[str, float] = {}
        self.windows: list[Window] = []
        self.epochs: dict[int, Epoch] = {}
        self.occurrences: list[Occurrence] = []
        self.workers = self.epochs_planned = self.checkpoints = 0
        self.end = ""
        self.clock = 0.0
        self._began = 0.0
        self._before = 0.0  # Seconds of training in earlier processes.
        self._steps_before: dict[int, int] = {}  # Number of an epoch -> steps before it.
        self._steps_per_epoch: int | None = None
        # Time of this process's first known progress, and the share of the training done by then.
        self._first: tuple[float, float] | None = None
        self._placed = 0.0  # Time when `place` was set.
        # Seconds of this process's slowest step of late; None before its first.
        self._slowest: float | None = None
        self._takers = {
            "begin": self._begin,
            "steps": self._steps,
            "epoch": self._epoch,
            "ranks": self._ranks,
            "checkpoint": self._checkpoint,
            "warning": self._warning,
            "end": self._end,
            "pass": self._pass,
        }

    def record(self, now: float | None = None) -> RunRecord:
        """Return the record of the events so far, without `config`.

        Args:
            now: Present time in seconds since 1970; None: ask the clock.
        """
        now = time.time() if now is None else now
        silence = longest_silence(self.clock - self._began, self._slowest)
        return RunRecord(
            name=self.name,
            config={},
            workers=self.workers,
            epochs_planned=self.epochs_planned,
            windows=self.windows,
            epochs=list(self.epochs.values()),
            occurrences=self.occurrences,
            checkpoints=self.checkpoints,
            end=self.end,
            is_live=not self.end and now - self.clock < silence,
            clock=self.clock,
            place=self.place,
            other_pass=self.other_pass,
            seconds_left=self._seconds_left(),
            memory=self.memory,
        )

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one event; an event with missing fields is ignored."""
        clock = float(event["time"])
        try:
            if event.get("event") == "begin":
                self._epochs_before = self._epochs_to_join(event)
            if self._epochs_before and event.get("epoch") is not None:
                event = {**event, "epoch": int(event["epoch"]) + self._epochs_before}
            take = self._takers.get(event.get("event", ""))
            if take is not None:
                take(event, clock)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return
        self.clock = max(self.clock, clock)

    def _epochs_to_join(self, event: Mapping[str, Any]) -> int:
        """Return the number of epochs before those of the fit that begins; 0 if it counts them itself."""
        from_first = int(event["epoch"]) == int(event["step"]) == 1
        return max(self.epochs, default=0) if self._joins and self.end and from_first else 0

    def _begin(self, event: Mapping[str, Any], clock: float) -> None:
        workers, epochs = int(event["workers"]), int(event["epochs"]) + self._epochs_before
        epoch, step = int(event["epoch"]), int(event["step"])
        if self.workers:
            self._before += self.clock - self._began
            with_workers = f"{workers} workers" if workers != 1 else "1 worker"
            told = f"in epoch {epoch}, at step {step} of it, with {with_workers}"
            what = "resumed" if epoch > 1 or step > 1 else "started again"
            self._happened(clock, "another fit" if self._epochs_before else what, told)
        # Not the latest of all: this process may be on a host whose clock is behind.
        self._began = self.clock = clock
        self.workers, self.epochs_planned = workers, epochs
        self.end = ""
        self.place = self.other_pass = self._first = self._slowest = None
        planned = event.get("steps_per_epoch")
        self._steps_per_epoch = None if planned is None else int(planned)
        # Steps after the checkpoint are trained again.
        kept = self._before_epoch(epoch) + step - 1
        self.windows = [window for window in self.windows if window.step <= kept]
        self.epochs = {n: one for n, one in self.epochs.items() if n < epoch}
        self._steps_before = {n: steps for n, steps in self._steps_before.items() if n <= epoch}

    def _steps(self, event: Mapping[str, Any], clock: float) -> None:
        rate = event.get("learning_rate")
        epoch, step = int(event["epoch"]), int(event["step"])
        speed = float(event["examples"]) / max(float(event["seconds"]), 1e-9)
        self.windows.append(
            Window(
                step=self._before_epoch(epoch) + step,
                seconds=self._at(clock),
                examples_per_second=speed,
                learning_rate=None if rate is None else float(rate),
                values=_with_nan(event["values"]),
            )
        )
        self.memory = _numbers(event.get("memory", {}))
        self._slowest = float(event.get("slowest", 0.0))
        self._train(epoch, step, self._steps_per_epoch, speed, event["values"], clock)

    def _pass(self, event: Mapping[str, Any], clock: float) -> None:
        """Process the progress of a pass, an event that is only shown live and never written to a file."""
        step, steps, speed = int(event["step"]), event["steps"], float(event["examples_per_second"])
        steps = None if steps is None else int(steps)
        if event["epoch"] is not None:
            steps = steps or self._steps_per_epoch
            self._train(int(event["epoch"]), step, steps, speed, event["values"], clock)
        elif event["ended"]:
            self.other_pass = None
        else:
            if self.end:  # A pass after the training, not its validation.
                self.end, self.place = "", None
            self.other_pass = PassProgress(
                str(event["title"]), None, step, steps, speed, _shown(event["values"])
            )

    def _train(
        self, epoch: int, step: int, steps: int | None, speed: float, values: Any, clock: float
    ) -> None:
        title = f"Epoch {epoch}/{self.epochs_planned}"
        shown = _shown(values)
        if not shown and self.place is not None:
            shown = dict(self.place.values)
        place = PassProgress(title, epoch, step, steps, speed, shown)
        done = _done(place, self.epochs_planned)
        self.place, self._placed = place, clock
        # Measure from here, not from the beginning: the first step includes tracing.
        if self._first is None and done is not None:
            self._first = clock, done

    def _seconds_left(self) -> float | None:
        done = None if self.place is None else _done(self.place, self.epochs_planned)
        if self._first is None or done is None or done <= self._first[1]:
            return None
        return (self._placed - self._first[0]) / (done - self._first[1]) * max(0.0, 1 - done)

    def _epoch(self, event: Mapping[str, Any], clock: float) -> None:
        number = int(event["epoch"])
        values, step = _with_nan(event["values"]), self._last_step()
        self.epochs[number] = Epoch(step, self._at(clock), values, number)
        if self.place is not None:
            self._steps_per_epoch = self._steps_per_epoch or self.place.step
            self.place = replace(self.place, steps=self.place.step, values=_shown(event["values"]))

    def _ranks(self, event: Mapping[str, Any], clock: float) -> None:
        found = self.epochs[int(event["epoch"])]
        ranks = {name: [float(one) for one in event[name]] for name in (*OUTSIDE, "seconds")}
        if any(len(one) != len(ranks["seconds"]) for one in ranks.values()):
            return
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
    """Return the values that are numbers."""
    return {name: float(one) for name, one in values.items() if isinstance(one, int | float)}


def _with_nan(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, with nan for nan and inf, which were written as null."""
    return _numbers({name: math.nan if one is None else one for name, one in values.items()})


def _shown(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all values, with None for nan and inf."""
    return {name: None if one is None else float(one) for name, one in values.items()}


def _done(place: PassProgress, epochs: int) -> float | None:
    """Return the share of a training of `epochs` epochs that is done at `place`; None if it is not known."""
    if place.epoch is None or not place.steps or not epochs:
        return None
    return min(1.0, (place.epoch - 1 + place.step / place.steps) / epochs)
