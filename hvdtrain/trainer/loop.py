"""The order of events in fit, evaluate and predict. All ranks pass through these lines in step."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.callback_states import CallbackStates, continue_files
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank, on_first
from hvdtrain.collectives.finite import FiniteWatch
from hvdtrain.collectives.metrics import read_state, without_sums, write_state
from hvdtrain.data import OwnSource, Share, Source
from hvdtrain.errors import UsageError
from hvdtrain.keras.writers import failing_together
from hvdtrain.keras_internals.variables import seed_variables
from hvdtrain.runtime import Rank
from hvdtrain.strategies.step_metrics import StepLogs
from hvdtrain.strategies.strategy import Logs, Steps, Strategy
from hvdtrain.trainer.callback_ranks import (
    TEST_METHODS,
    TRAIN_METHODS,
    backups_kept,
    need_global_batches,
    on_this_rank,
    save_within_epochs,
    saving_together,
)
from hvdtrain.trainer.divergence import LossWatch
from hvdtrain.trainer.event_log import EventLog
from hvdtrain.trainer.progress import Progress
from hvdtrain.trainer.resume import Position, SavedFit
from hvdtrain.trainer.run_dir import RunDir, epoch_line
from hvdtrain.trainer.run_facts import facts_of
from hvdtrain.trainer.shares import checksum_of, epoch_shares, grouped
from hvdtrain.trainer.stragglers import StragglerWatch
from hvdtrain.worker.heartbeat import in_phase


@dataclass(frozen=True)
class FitPlan:
    """What one call of `fit` will do: the same on every rank, but for what it shows."""

    train: Source
    validation: Source | None
    initial_epoch: int
    epochs: int
    validation_freq: int | Collection[int]
    callbacks: Sequence[keras.callbacks.Callback]
    verbose: int

    def validates_after(self, epoch: int) -> bool:
        """Whether it evaluates at the end of `epoch`, counted from 0."""
        if self.validation is None:
            return False
        if not isinstance(self.validation_freq, Collection):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


@dataclass(frozen=True)
class EvaluatePlan:
    """What one call of `evaluate` will do."""

    source: Source
    callbacks: Sequence[keras.callbacks.Callback]
    verbose: int


@dataclass(frozen=True)
class Loop:
    """Runs the steps of one prepared model.

    Attributes:
        guard: compare the replicas, and look for nan in the weights, after the first step and every epoch.
        probe: before the first step, see whether what the workers compute adds up to what one would.
        steps_per_execution: how many steps run between two calls of callbacks.
        run_dir: where the run's files go; None: nowhere.
        config: what config.json says of the Trainer.
        saved: the checkpoints of the fit; None: it has none.
        losses: ends a training that diverges; None: it goes on, as in Keras.
        finite: warns of nan once in each fit.
    """

    model: keras.Model
    strategy: Strategy
    steps: Steps
    rank: Rank
    guard: bool
    probe: bool
    steps_per_execution: int
    run_dir: RunDir | None
    config: dict[str, Any]
    saved: SavedFit | None = None
    losses: LossWatch | None = None
    finite: FiniteWatch = field(default_factory=FiniteWatch)

    @cached_property
    def events(self) -> EventLog:
        """What happens goes here; without a folder, and on all ranks but the first, it is never begun."""
        return EventLog() if self.run_dir is None else self.run_dir.events

    def fit(self, plan: FitPlan) -> keras.callbacks.History:
        """Train; return Keras's History."""
        with ExitStack() as blocks:
            position = None
            if self.saved is not None:
                facts = facts_of(
                    self.config, plan.train, plan.validation, self.model, plan.callbacks
                )
                position = blocks.enter_context(self.saved.opened(plan.initial_epoch, facts))
            # As long as the folder is this run's.
            blocks.enter_context(self.events.watching())
            return self._fit(plan, position)

    def _fit(self, plan: FitPlan, resumed: Position | None) -> keras.callbacks.History:
        """Train from where `resumed` says; None: from the beginning."""
        together = self.strategy.saves_together
        own = on_this_rank(plan.callbacks, self.rank.is_first, together)
        if resumed is not None and self.rank.is_first:
            continue_files(own, resumed.epoch)
        callbacks = keras.callbacks.CallbackList(
            failing_together(own, ALL_RANKS),
            add_history=True,
            model=self.model,
            epochs=plan.epochs,
            steps=plan.train.steps_per_epoch,
            verbose=plan.verbose,
        )
        if together:
            saving_together(own, partial(self.strategy.save, self.model))
        self.model.stop_training = False
        with self.strategy.restored_by_first(self.model):
            callbacks.on_train_begin()
        if self.saved is not None:
            self.saved.callbacks = CallbackStates(callbacks_with_history(own, callbacks))
        # Callbacks may have restored state on one rank, so what counts is what rank 0 has now.
        initial_epoch = int(self.model._initial_epoch or plan.initial_epoch)
        first = int(ALL_RANKS.broadcast(initial_epoch, 0, "hvdtrain_initial_epoch"))
        if self.saved is None:
            self._in_run_dir(lambda run_dir: run_dir.begin(first))
        self.strategy.broadcast(self.model, without=seed_variables(self.model))
        begin = resumed or Position(first)
        self._write_config(plan)
        if not begin.stopped and begin.epoch < plan.epochs:
            self._begin_events(plan, begin)
        if resumed is not None:
            self._tell(resumed, plan)
            if not resumed.stopped and resumed.epoch < plan.epochs:
                self._skip(plan, range(first, resumed.epoch))
            if resumed.step == 0:
                self._restore()
        logs: Logs = {}
        stragglers = StragglerWatch()
        for epoch in range(begin.epoch, 0 if begin.stopped else plan.epochs):
            logs = self._epoch(plan, epoch, callbacks, begin)
            times = stragglers.look(epoch)
            if times:
                self.events.note("ranks", epoch=epoch + 1, **times)
            stopped = any_rank(bool(self.model.stop_training), "stop")
            if self.saved is not None:
                last = stopped or epoch + 1 == plan.epochs
                # However few steps an epoch has, and however long its validation took.
                ends = not last and self.saved.is_told_to_end(now=True)
                with in_phase("saving"):
                    self.saved.save(self.model, {}, epoch + 1, 0, stopped, last or ends)
                if ends:
                    raise self.saved.preempted()
            if stopped:
                break
        if plan.epochs > first:
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        with backups_kept(own):
            callbacks.on_train_end(logs)
            if self.run_dir is not None:
                self._in_run_dir(lambda run_dir: run_dir.keep())
                self.strategy.save(self.model, self.run_dir.model)
        return self.model.history

    def evaluate(self, plan: EvaluatePlan) -> Logs:
        """Return the model's metrics over the whole source."""
        callbacks = keras.callbacks.CallbackList(
            failing_together(on_this_rank(plan.callbacks, self.rank.is_first), ALL_RANKS),
            model=self.model,
            epochs=1,
            steps=plan.source.steps_per_epoch,
            verbose=plan.verbose,
        )
        progress = Progress(plan.verbose, "Evaluation", plan.source.steps_per_epoch)
        logs = self._evaluate(plan.source, callbacks, plan.callbacks, progress)
        progress.end(logs)
        return logs

    def _epoch(
        self,
        plan: FitPlan,
        epoch: int,
        callbacks: keras.callbacks.CallbackList,
        begin: Position,
    ) -> Logs:
        """Train one epoch, the first one from the step of `begin` on; return its logs, those of all workers."""
        check_first_step = epoch == begin.epoch
        done = skip = begin.step if check_first_step else 0
        title = f"Epoch {epoch + 1}/{plan.epochs}"
        progress = Progress(plan.verbose, title, plan.train.steps_per_epoch, done)
        self.strategy.reset_metrics(self.model)
        callbacks.on_epoch_begin(epoch)
        if self.strategy.part.index:
            # As in Keras, what a callback has counted by now (model.evaluate) is part of the epoch: once.
            self.strategy.reset_metrics(self.model)
        shares = epoch_shares(plan.train, epoch, self.strategy.part, skip=skip)
        if self.saved is not None:
            self.saved.seen = 0
        if skip:
            read = not plan.train.agreed
            seen = checksum_of(itertools.islice(shares, skip)) if read else None
            # Behind on_epoch_begin, which has run for this epoch before, and may have changed something once more.
            self._restore()
            if self.saved is not None and seen is not None:
                self.saved.require_seen(seen)
        # As in Keras, an epoch that is stopped before it begins has one step.
        stopped = any_rank(bool(self.model.stop_training), "stop")
        step_logs: Logs = {}
        share: Share | None = None
        global_batches = need_global_batches(plan.callbacks, TRAIN_METHODS)
        saving = save_within_epochs(plan.callbacks)
        if saving and self.config["sync"] is not None:
            raise UsageError(
                "sync: between two rounds no rank has the model, so that ModelCheckpoint and BackupAndRestore can save "
                "only when an epoch ends: leave save_freq out, or use checkpoints=hvdtrain.Checkpoints(every_steps=...)"
            )
        self.events.begin_steps()
        # Of data that the ranks divided themselves one may see an even step where another does not.
        together = 1 if isinstance(plan.train, OwnSource) else self.steps_per_execution
        for group in grouped(shares, together):
            if self.saved is not None and done > skip:
                self._save_if_due(self.saved, step_logs, epoch, done)
            if self.losses is not None:
                self.losses.look()
            if self.probe and done == 0 and check_first_step:
                self.strategy.probe(self.steps, group[0])
            callbacks.on_train_batch_begin(done)
            step_logs = self.steps.train(group)
            share = group[-1]
            if self.losses is not None:
                self.losses.add(epoch, done + len(group) - 1, len(group), step_logs, share)
            examples = sum(s.global_examples for s in group)
            progress.step(len(group), examples, step_logs)
            facts = partial(self._step_facts, epoch, done + len(group), step_logs)
            self.events.count(len(group), examples, facts)
            with (
                self._shown(step_logs, share, global_batches) as shown,
                self.strategy.as_one_process(self.model) if saving else nullcontext(),
            ):
                callbacks.on_train_batch_end(done + len(group) - 1, shown)
            if self.guard and done == skip and check_first_step:
                self._check(self.strategy.check_step, "after the first step", epoch_ends=False)
            done += len(group)
            if self.saved is not None:
                self.saved.steps += len(group)
                self.saved.seen = checksum_of(group, self.saved.seen)
            if stopped or (global_batches and any_rank(bool(self.model.stop_training), "stop")):
                break
        if share is None:
            raise UsageError("The training data has no batches: nothing to train on")
        self.steps.finish()
        if self.losses is not None:
            self.losses.look(epoch_ends=True)
        progress.stop()
        facts = partial(self._step_facts, epoch, done, step_logs)
        self.events.count(0, 0, facts, last=True)
        logs = self.strategy.logs(self.model, step_logs, share)
        self.strategy.end_epoch(self.model)
        if plan.validates_after(epoch):
            assert plan.validation is not None
            found = self._evaluate(plan.validation, callbacks, plan.callbacks)
            logs |= {f"val_{name}": value for name, value in found.items()}
        if self.guard:
            self._check(self.strategy.check, f"after epoch {epoch + 1}", epoch_ends=True)
        with self.strategy.as_one_process(self.model):
            callbacks.on_epoch_end(epoch, logs)
        progress.end(logs)
        self._write_metrics(plan, epoch, logs, progress)
        return logs

    def _evaluate(
        self,
        source: Source,
        callbacks: keras.callbacks.CallbackList,
        everyones: Sequence[keras.callbacks.Callback],
        progress: Progress | None = None,
    ) -> Logs:
        """Return the model's metrics over `source`; the metrics' state is that of all workers then."""
        self.model.stop_evaluating = False
        callbacks.on_test_begin()
        self.strategy.reset_metrics(self.model)
        stopped = any_rank(bool(self.model.stop_evaluating), "stop")
        step_logs: Logs = {}
        share: Share | None = None
        global_batches = need_global_batches(everyones, TEST_METHODS)
        for step, share in enumerate(epoch_shares(source, 0, self.strategy.part)):
            callbacks.on_test_batch_begin(step)
            step_logs = self.steps.test(share)
            if progress is not None:
                progress.step(1, share.global_examples, step_logs)
            with self._shown(step_logs, share, global_batches) as shown:
                callbacks.on_test_batch_end(step, shown)
            if stopped or (global_batches and any_rank(bool(self.model.stop_evaluating), "stop")):
                break
        if share is None:
            raise UsageError("The evaluation data has no batches: nothing to evaluate on")
        self.steps.finish()
        logs = self.strategy.logs(self.model, step_logs, share)
        callbacks.on_test_end(logs)
        return logs

    # The pieces of that order.

    def _skip(self, plan: FitPlan, epochs: range) -> None:
        """Let the data be as after these epochs."""
        part = self.strategy.part
        plan.train.skip(epochs, part.index, part.count)
        if plan.validation is not None:
            evaluations = [0 for epoch in epochs if plan.validates_after(epoch)]
            plan.validation.skip(evaluations, part.index, part.count)

    def _restore(self) -> None:
        assert self.saved is not None
        self.saved.give(self.model)

    def _save_if_due(self, saved: SavedFit, step_logs: Logs, epoch: int, done: int) -> None:
        """Raises Preempted if the job was told to end."""
        ends = saved.is_told_to_end()
        if ends or saved.is_due():
            self.steps.finish()
            # Metrics that a loss of nan has spoilt are in no checkpoint; and where the model has just gone back to
            # one, this one would be that with another number.
            rewound = self.losses is not None and self.losses.look(now=True)
            if ends or not rewound:
                with in_phase("saving"):
                    saved.save(self.model, step_logs, epoch, done, last=ends)
        if ends:
            raise saved.preempted()

    def _tell(self, resumed: Position, plan: FitPlan) -> None:
        if self.rank.is_first and self.run_dir is not None:
            print(
                f"run_dir {str(self.run_dir.path)!r}: {resumed.describe(plan.epochs)}", flush=True
            )

    def _check(
        self, replicas: Callable[[keras.Model, str], None], when: str, epoch_ends: bool
    ) -> None:
        replicas(self.model, when)
        if self.losses is not None:
            self.losses.require_finite(self.model.trainable_variables, when, epoch_ends)
        elif self.rank.is_first:
            self.finite.look(self.model.trainable_variables, when)

    @contextmanager
    def _shown(self, step_logs: Logs, share: Share, globally: bool) -> Iterator[Logs]:
        """What callbacks see of a step: `globally`, the epoch's logs and metrics so far over all workers.

        This rank's own metrics go on afterwards. Where a callback has changed them (reset_metrics, evaluate), they
        are as in one process from there on: the first worker's count, and the others begin with nothing.
        """
        # Not one worker alone: where that is several ranks, one has the losses of all its stages.
        if globally:
            self.steps.finish()
        if not globally or self.rank.size == self.strategy.workers == 1:
            yield step_logs
            return
        own = read_state(self.model.metrics)
        logs = self.strategy.logs(self.model, step_logs, share)
        everyones = read_state(self.model.metrics)
        yield logs
        now = read_state(self.model.metrics)
        changed = not all(map(partial(np.array_equal, equal_nan=True), now, everyones))
        if not any_rank(changed, "metrics_changed"):
            write_state(self.model.metrics, own)
        elif self.strategy.part.index:
            rules = step_logs.rules if isinstance(step_logs, StepLogs) else {}
            without_sums(self.model.metrics, rules)

    def _in_run_dir(self, write: Callable[[RunDir], None]) -> None:
        """Let rank 0 write; what it cannot write is an error on all ranks."""
        run_dir = self.run_dir
        if run_dir is not None:
            on_first(lambda: write(run_dir), f"run_dir {str(run_dir.path)!r}")

    def _write_config(self, plan: FitPlan) -> None:
        if self.run_dir is None:
            return
        facts = {"workers": self.rank.size, "epochs": plan.epochs, "examples": plan.train.examples}
        versions = {"keras": keras.__version__, "tensorflow": tf.__version__}
        optimizer = keras.saving.serialize_keras_object(self.model.optimizer)
        config = self.config | facts | versions | {"optimizer": optimizer}
        self._in_run_dir(lambda run_dir: run_dir.write_config(config))

    def _write_metrics(self, plan: FitPlan, epoch: int, logs: Logs, progress: Progress) -> None:
        validated = plan.validation is not None
        seconds, rate = progress.seconds, progress.examples_per_second
        line = epoch_line(epoch, logs, validated, seconds, rate)
        if self.run_dir is not None and self.rank.is_first:
            self.run_dir.metrics.append([line[0]], line[1])
            speed = {"seconds": seconds, "examples_per_second": rate}
            self.events.note(
                "epoch", epoch=epoch + 1, values=logs, learning_rate=self._learning_rate(), **speed
            )

    def _begin_events(self, plan: FitPlan, begin: Position) -> None:
        if self.run_dir is not None and self.rank.is_first:
            self.events.begin(
                workers=self.rank.size,
                epochs=plan.epochs,
                steps_per_epoch=plan.train.steps_per_epoch,
                examples=plan.train.examples,
                epoch=begin.epoch + 1,
                step=begin.step + 1,
                host=socket.gethostname(),
            )

    def _step_facts(self, epoch: int, step: int, logs: Logs) -> dict[str, Any]:
        """What the log of events says of a step."""
        rate = self._learning_rate()
        return {"epoch": epoch + 1, "step": step, "learning_rate": rate, "values": dict(logs)}

    def _learning_rate(self) -> float | None:
        """That of the model's optimizer; a model with several of its own has none."""
        optimizer = getattr(self.model, "optimizer", None)
        return None if optimizer is None else float(optimizer.learning_rate)


def callbacks_with_history(
    own: Sequence[keras.callbacks.Callback], callbacks: keras.callbacks.CallbackList
) -> list[keras.callbacks.Callback]:
    """Return this rank's callbacks as the user gave them, and the History that Keras has added."""
    history = [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.History)]
    return [*own, *(c for c in history if c not in own)]


def predict(
    predict: Callable[[Share], Any], strategy: Strategy, source: Source, progress: Progress
) -> Any:
    """Return the outputs that `predict` finds for all of `source`, in its order."""

    def outputs() -> Iterator[tuple[Share, Any]]:
        for share in epoch_shares(source, 0, strategy.part):
            yield share, predict(share)
            progress.step(1, share.global_examples, {})

    found = strategy.gather(outputs())
    progress.end({})
    return found
