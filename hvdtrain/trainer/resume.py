"""Saves checkpoints during a fit, and resumes from the newest one when the same command runs again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import keras

from hvdtrain.checkpoint.background_write import BackgroundWrite
from hvdtrain.checkpoint.callback_states import CallbackStates
from hvdtrain.checkpoint.folder import (
    Checkpoint,
    NotFinite,
    newest,
    numbered,
    require_finite,
    save,
    warn_unsaved,
)
from hvdtrain.checkpoint.lock import lock_folder, lock_kept
from hvdtrain.checkpoint.mirror import Mirror, MirrorError
from hvdtrain.checkpoint.position import FitPosition
from hvdtrain.checkpoint.save_schedule import Checkpoints
from hvdtrain.checkpoint.state import TrainingState
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank, raise_alike
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.collectives.metrics import read_state, write_state
from hvdtrain.data.random_generators import IN_USE, comparable
from hvdtrain.environment import RESUME
from hvdtrain.errors import (
    DivergedError,
    HvdtrainError,
    Preempted,
    UsageError,
    warn_user,
)
from hvdtrain.keras_internals.optimizers import rate_variable
from hvdtrain.rank_variables import is_elastic
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.step_metrics import StepLogs
from hvdtrain.strategies.strategy import Logs, Strategy
from hvdtrain.trainer.elastic_job import WorkersChanged, resume_after_restart
from hvdtrain.trainer.preemption import Preemption
from hvdtrain.trainer.run_dir import RunDir
from hvdtrain.trainer.run_facts import refuse_changes, refuse_parts
from hvdtrain.worker.elastic_place import ON_DISK, tell_saved

FOLDER = "checkpoints"


class FitCheckpoints:
    """The checkpoints of one fit, in a folder of its run_dir.

    Args:
        schedule: When to save, and how many checkpoints to keep.
        resume: "auto": resume from the newest checkpoint if there is one; "must": fail without one; "never": fail with
            one.
        run_dir: Folder of the run.
        strategy: Strategy that runs the training.

    Attributes:
        steps: Number of steps trained so far, over all processes of this run.
        saved_steps: Value of `steps` when a checkpoint was last due.
        exists: Whether a checkpoint is known to be complete; rank 0 may be writing the first one.
        seen: Checksum of the batches of this epoch so far, for data that is read in order; see `require_seen`.
        callbacks: States of this rank's callbacks, set when training begins.
    """

    def __init__(
        self, schedule: Checkpoints, resume: str, run_dir: RunDir, strategy: HorovodStrategy
    ) -> None:
        self.steps = self.saved_steps = self.seen = 0
        self.exists = False
        self.callbacks = CallbackStates([])
        self._schedule = schedule
        self._resume = resume
        self._run_dir = run_dir
        self._strategy = strategy
        self._name = f"run_dir {str(run_dir.path)!r}"
        self._folder = run_dir.path / FOLDER
        self._lock: int | None = None  # On rank 0.
        self._keeping = threading.Lock()  # The writing thread checks the folder, too.
        self._found: Checkpoint | None = None  # On rank 0, until the model is restored.
        self._saved_at, self._is_time = time.monotonic(), False
        self._facts: dict[str, Any] = {}
        self._alike = True
        self._data_draws = False
        self._writing: BackgroundWrite | None = None
        self._failures: list[str] = []  # Failed saves in a row, on rank 0.
        # Step of the newest checkpoint that this process has written; on all ranks after the last save.
        self._written: int | None = None
        self._same_as: dict[int, int] = {}  # Checkpoint saved after a rewind -> restored one.
        self._mirror: Mirror | None = None
        self._opened = False
        self._preemption = Preemption(file=schedule.preemption_file)
        self._state: TrainingState | None = None

    @contextmanager
    def opened(self, initial_epoch: int, facts: Mapping[str, Any]) -> Iterator[FitPosition | None]:
        """Lock the run's folder for this block, and read the newest checkpoint. A collective.

        Args:
            initial_epoch: Index of the epoch, from 0, at which a new run begins.
            facts: What must not change between the processes of a run; see `fit_facts`.

        Yields:
            The position to resume from; None to start at the beginning.

        Raises:
            UsageError: On all ranks, if another run uses or has used the folder, the run differs from the saved one,
                all checkpoints are damaged, `resume` does not allow what was found, or this is the second fit.
        """
        if self._opened:
            raise UsageError(
                "fit was called before: with checkpoints a Trainer trains once, and resumes when "
                "the script is run again. Pass all epochs to the first fit, or create a new Trainer "
                "with another run_dir"
            )
        self._opened = True
        self._facts = json.loads(json.dumps(facts, default=str))
        try:
            resume = resume_after_restart(os.environ, self._resume)
            found = on_first(lambda: self._open(initial_epoch, resume), self._name)
            position = None
            if found is not None:
                position = FitPosition(**found["position"])
                self.steps = self.saved_steps = position.steps
                self.exists = True
                self._alike = found["alike"]
            with self._preemption.listening():
                yield position
        except DivergedError:
            # Raised on all ranks, which wait: see `save`.
            on_first(self._finish_writing, self._name)
            raise
        finally:
            try:
                self._finish_writing()
            finally:
                if self._lock is not None:
                    os.close(self._lock)

    def _open(self, initial_epoch: int, resume: str) -> dict[str, Any] | None:
        path, began = str(self._run_dir.path), self._folder.is_dir()
        if self._schedule.mirror is not None:
            self._mirror = Mirror(os.fspath(self._schedule.mirror), self._schedule.keep)
            self._claim(initial_epoch, began)
            found = newest(self._folder)
            steps = -1 if found is None else found.facts["position"]["steps"]
            self._found = newest(self._folder) if self._mirror.fetch(self._folder, steps) else found
        if resume == "never" and numbered(self._folder):
            raise UsageError(
                f"run_dir {path!r} has checkpoints, and resume='never': choose a new folder, or "
                "move this one away"
            )
        if resume == "must" and not numbered(self._folder):
            raise UsageError(
                f"run_dir {path!r} has no checkpoint, and resume='must': check that it is the "
                "right folder, or use resume='auto' to start from scratch"
            )
        if self._mirror is None:
            self._claim(initial_epoch, began)
            self._found = newest(self._folder)
        if self._found is None:
            if numbered(self._folder):
                raise UsageError(
                    f"run_dir {path!r}: all checkpoints are damaged. Move {str(self._folder)!r} "
                    "away to start from scratch"
                )
            return None
        before, now = self._found.facts, self._facts
        if "run" not in before:
            raise UsageError(
                f"run_dir {path!r}: the checkpoints there are those of a CheckpointManager: choose another run_dir"
            )
        refuse_changes(before["run"], now["run"], path)
        alike = before["ranks"] == now["ranks"]
        if alike:
            refuse_changes(before["own"], now["own"], path)
        elif before["ranks"]["layout"] != now["ranks"]["layout"]:
            refuse_parts(self._found.ranks[0]["process"]["callbacks"])
        return {"position": before["position"], "alike": alike}

    def _claim(self, initial_epoch: int, continued: bool) -> None:
        """Create and lock the folders, before anything is written there."""
        self._run_dir.begin(initial_epoch, continued)
        self._folder.mkdir(exist_ok=True)
        self._lock = lock_folder(self._folder, self._name)
        self._run_dir.keep = self._keep_folder

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """Note whether the data draws random numbers as it is read again in this block."""
        with IN_USE:
            begun = comparable()
        yield
        with IN_USE:
            self._data_draws |= comparable() != begun

    def give(self, model: keras.Model, within_epoch: bool) -> None:
        """Restore the model and the callbacks from the checkpoint that `opened` found. A collective.

        Args:
            model: Model with its optimizer and metrics.
            within_epoch: Whether the data of this epoch is being read. If it draws random numbers, its thread has
                advanced Python's and NumPy's generators to where they must be.

        Raises:
            UsageError: On all ranks, if the model or its optimizer differs from the saved one; names the first
                variable.
        """
        found, self._found = self._found, None
        arrays, ranks = (None, None) if found is None else (dict(found.arrays), found.ranks)
        try:
            # A thread that reads ahead may have drawn on some ranks only.
            keep = within_epoch and any_rank(self._data_draws, "data_draws")
            everyone = self._state_of(model).give(arrays, ranks, self._alike, not keep)
        except UsageError as error:
            raise UsageError(
                f"The checkpoints in {str(self._folder)!r} belong to another model or optimizer: {error}. "
                "Choose a new run_dir, or restore the model"
            ) from error
        rank = ALL_RANKS.rank()
        # Ranks that divide the model in another way still read the same data.
        self.seen = everyone[rank if len(everyone) == ALL_RANKS.size() else 0]["seen"]
        self.callbacks.give(everyone[rank if self._alike else 0]["callbacks"])

    def rewind(self, model: keras.Model, epoch: int, epoch_ends: bool) -> int | None:
        """Restore only the model from the newest checkpoint; data and callbacks continue. A collective.

        A learning rate that is a number keeps its value.

        Args:
            model: Model with its optimizer and metrics. The metrics are reset unless the checkpoint was saved within
                this epoch.
            epoch: Index of the epoch in progress, from 0.
            epoch_ends: Whether no step of this epoch follows; the metrics then keep their values if they would be
                reset.

        Returns:
            The number of steps of the checkpoint; None if there is none. For a checkpoint that was saved right after a
            rewind, without a step in between, that of the checkpoint restored then.
        """
        found: Checkpoint | None = None

        def read() -> dict[str, Any] | None:
            nonlocal found
            self._finish_writing()
            self._keep_folder()
            found = newest(self._folder)
            if found is None:
                return None
            return {
                **found.facts["position"],
                "alike": found.facts["ranks"] == self._facts["ranks"],
            }

        position = on_first(read, self._name)
        if position is None:
            return None
        counted = read_state(model.metrics)
        arrays, ranks = (None, None) if found is None else (dict(found.arrays), found.ranks)
        rate = rate_variable(model.optimizer)
        # Callbacks, which continue, have set it for this epoch.
        kept = None if rate is None else rate.numpy()
        alike = position["alike"]
        everyone = self._state_of(model).give_variables(arrays, ranks, alike)
        own = everyone[ALL_RANKS.rank() if alike else 0]
        self.callbacks.exchange_averages(own["process"]["callbacks"])
        if rate is not None:
            rate.assign(kept)
        within = position["epoch"] == epoch and position["step"] > 0
        if not within and epoch_ends:
            write_state(model.metrics, counted)
        elif not within:
            self._strategy.reset_metrics(model)
        steps = int(position["steps"])
        steps = self._same_as.get(steps, steps)
        self._same_as[self.steps] = steps
        return steps

    def require_seen(self, seen: int) -> None:
        """Check that the resumed run has read the same batches as the saved one did in this epoch. A collective.

        Args:
            seen: Checksum of the batches that were read again; see `checksum_of`.

        Raises:
            UsageError: On all ranks, if it differs from the saved checksum.
        """
        if any_rank(seen != self.seen, "seen"):
            raise UsageError(
                "the training data does not yield the same batches as before the restart, so training cannot resume "
                "within the epoch. Make its order depend on seeds only, and start again in another run_dir; "
                f"or remove the newest checkpoint in {str(self._folder)!r} to resume from the one before"
            )

    def should_stop(self, now: bool = False) -> bool:
        """Whether to save and stop now, the same on every rank. A collective at some steps, and always with `now`."""
        minutes = self._schedule.every_minutes
        due = minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes
        ends, self._is_time = self._preemption.agreed(self.steps, due, now)
        return ends

    def ends_validation(self) -> Callable[[int], bool]:
        """Return a function of the batches of one validation so far, see `Preemption.in_validation`."""
        return self._preemption.in_validation()

    def is_due(self) -> bool:
        """Whether to save now, within an epoch, the same on every rank. Call `should_stop` first."""
        every = self._schedule.every_steps
        return self._is_time or (every is not None and self.steps - self.saved_steps >= every)

    def preempted(self) -> HvdtrainError:
        """Return the exception to raise after the last save: the job was asked to stop, or its workers change.

        It is not Preempted if this process could write no checkpoint: a job that starts again upon its exit code would
        train the same steps for ever.
        """
        if is_elastic(os.environ) and not self._preemption.stop_requested:
            return WorkersChanged("hosts have joined or are leaving.")
        file = self._schedule.preemption_file
        by = f" (by the file {str(file)!r})" if self._preemption.by_file else ""
        stopped = f"this job was asked to stop{by}, and stopped after {self.steps} steps"
        if self._written is None:
            return HvdtrainError(f"{stopped}, and no checkpoint could be written: see the warnings")
        lost = self.steps - self._written
        if lost:
            stopped += (
                f", of which the last {lost} are lost, as no checkpoint of them could be written"
            )
        return Preempted(
            f"{stopped}. Run the same command again to resume from the newest checkpoint in {str(self._folder)!r}"
        )

    def save(
        self, model: keras.Model, logs: Logs, position: FitPosition, last: bool = False
    ) -> None:
        """Capture the state, and write a checkpoint of it in the background. A collective.

        Nothing is saved while the previous checkpoint is still being written. If one cannot be written, or the weights
        are nan or inf, a warning follows at the next save.

        Args:
            model: Model whose steps have finished.
            logs: Logs of the last step.
            position: Position to resume from; its `steps` are those trained so far.
            last: Whether this is the last checkpoint; waits until it and the one before are written.

        Raises:
            UsageError: On all ranks, if `max_failures` checkpoints in a row could not be written.
        """
        self.saved_steps, self._saved_at = self.steps, time.monotonic()
        failed: Exception | None = None
        if last:
            on_first(self._finish_writing, self._name)
        elif self._writing is None or self._writing.has_ended:
            try:
                self._finish_writing()
            except Exception as error:  # Rank 0 tells the others below.
                failed = error
        rules = logs.rules if isinstance(logs, StepLogs) else {}
        state = self._state_of(model)
        own = state.own({"callbacks": self.callbacks.take(), "seen": self.seen}, rules)
        # Only rank 0 writes, so only it knows of a write in progress and of failures.
        failed = failed or self._failed_too_often()
        here = [self._writing is not None, self.exists, failed is not None, own]
        busy, exists, ends, ranks = zip(*ALL_RANKS.exchange(here, "saving"), strict=True)
        self.exists = any(exists)
        if any(ends):
            raise_alike(failed, "checkpoints")
        if any(busy):
            return
        arrays = state.variables()
        if ALL_RANKS.rank() == 0:
            now = asdict(replace(position, steps=self.steps))
            content = Checkpoint({**self._facts, "position": now}, arrays, list(ranks))
            write = partial(self._write, self.steps, content, state.untrained)
            self._writing = BackgroundWrite(self.steps, write)
        if last:
            # All ranks wait: if one exits with an error code, the launcher ends rank 0 before it has written.
            self._written = on_first(self._newest_written, self._name)

    def _state_of(self, model: keras.Model) -> TrainingState:
        if self._state is None:
            self._state = TrainingState(model, self._strategy)
        return self._state

    def _write(self, steps: int, content: Checkpoint, untrained: Collection[str]) -> None:
        # In this thread, as it reads all of the state: no step waits for it.
        require_finite(content.arrays.items(), untrained)
        self._keep_folder()
        began = time.monotonic()
        path = save(self._folder, steps, content, self._schedule.keep)
        size = sum(array.nbytes for array in content.arrays.values())
        seconds = time.monotonic() - began
        self._run_dir.events.note("checkpoint", steps=steps, bytes=size, seconds=seconds)
        tell_saved(ON_DISK)
        if self._mirror is not None:
            self._mirror.copy(path)

    def _keep_folder(self) -> None:
        """Create the folder again if it was removed; raise OSError if it now belongs to another run."""
        with self._keeping:
            self._lock = lock_kept(self._folder, self._name, self._lock)

    def _failed_too_often(self) -> UsageError | None:
        """Return the error that ends the training on rank 0 after too many failed saves."""
        count, most = len(self._failures), self._schedule.max_failures
        if most is None or count < most:
            return None
        return UsageError(
            f"{count} checkpoints in a row could not be written, {self._failures[-1]}. Training stops, because of "
            f"Checkpoints(max_failures={most}). Fix the storage, and run the same command again to resume from the "
            f"newest checkpoint in {str(self._folder)!r}"
        )

    def _newest_written(self) -> int | None:
        self._finish_writing()
        return self._written

    def _finish_writing(self) -> None:
        """Wait for the checkpoint being written, and warn if it failed; only rank 0 has one."""
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.error()
        if writing is None:
            return
        if error is None or isinstance(error, MirrorError):
            self.exists, self._written = True, writing.step
        if error is None:
            self._failures = []
            return
        if not isinstance(error, NotFinite):
            self._failures.append(f"the last one after step {writing.step}: {error}")
        if not isinstance(error, MirrorError):
            warn_unsaved(writing.step, error)
            return
        warn_user(
            f"The checkpoint after step {writing.step} could not be copied to {self._schedule.mirror!r}: {error}. "
            "Training continues"
        )


def fit_checkpoints(
    schedule: Checkpoints | None,
    resume: Literal["auto", "never", "must"],
    run_dir: RunDir | None,
    strategy: Strategy,
) -> FitCheckpoints | None:
    """Return the checkpoints of a Trainer's fit; None without `schedule`.

    Args:
        schedule: The Trainer's argument `checkpoints`.
        resume: The Trainer's argument; the variable HVDTRAIN_RESUME takes precedence.
        run_dir: Folder of the run.
        strategy: Strategy that runs the training.

    Raises:
        UsageError: If an argument is wrong, run_dir is missing, or the strategy is not Horovod's.
    """
    wanted = os.environ.get(RESUME, resume)
    if wanted not in ("auto", "never", "must"):
        raise UsageError(f"resume={wanted!r} (or {RESUME}): choose 'auto', 'never' or 'must'")
    if schedule is None and is_elastic(os.environ) and ALL_RANKS.rank() == 0:
        warn_user(
            "This job is elastic, but its Trainer has no checkpoints: the job ends when a worker is lost, and no new "
            "worker can join. Pass checkpoints=hvdtrain.Checkpoints() and a run_dir that all hosts share"
        )
    if schedule is None:
        if wanted == "must":
            raise UsageError("resume='must' needs checkpoints=Checkpoints() and run_dir")
        return None
    if not isinstance(schedule, Checkpoints):
        raise UsageError(f"checkpoints={schedule!r}: pass hvdtrain.Checkpoints(...)")
    if run_dir is None:
        raise UsageError("checkpoints needs run_dir, the folder to write them to")
    if not isinstance(strategy, HorovodStrategy):
        raise UsageError(
            f"checkpoints works with strategy='horovod' (here: {strategy.name}): leave it out, and use "
            "keras.callbacks.ModelCheckpoint"
        )
    return FitCheckpoints(schedule, wanted, run_dir, strategy)
