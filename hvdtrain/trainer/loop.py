"""The loops of fit, evaluate and predict, and the order of events in them. All ranks execute them in step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.callback_states import CallbackStates, continue_files
from hvdtrain.checkpoint.position import FitPosition
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.collectives.finite import FiniteWatch
from hvdtrain.collectives.metrics import read_state, without_sums, write_state
from hvdtrain.data import ShardedSource, Share, Source
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
    callbacks_of_rank,
    need_global_batches,
    save_within_epochs,
    saving_together,
    written_by_first,
)
from hvdtrain.trainer.divergence import LossWatch
from hvdtrain.trainer.fit_record import FitRecord
from hvdtrain.trainer.plans import FitPlan
from hvdtrain.trainer.progress import Progress, Show, showing
from hvdtrain.trainer.resume import FitCheckpoints
from hvdtrain.trainer.run_facts import fit_facts
from hvdtrain.trainer.shares import checksum_of, epoch_shares, grouped
from hvdtrain.trainer.stragglers import StragglerWatch
from hvdtrain.worker.heartbeat import in_phase


@dataclass(frozen=True)
class Loop:
    """Runs the steps of one prepared model.

    Attributes:
        model: Compiled model with all its variables.
        strategy: Strategy that runs the steps on all workers.
        steps: Steps of the model.
        rank: This process's place in the job.
        guard: Whether to compare the replicas and look for nan in the weights, after the first step and after every
            epoch.
        probe: Whether to check, before the first step, that gradients of parts of a batch add up to those of the whole.
        steps_per_execution: Number of steps between two calls of the callbacks.
        record: Writer of the run's files.
        saved: Checkpoints of the fit, if any.
        losses: Watch that acts on a loss of nan or inf; None: training continues, as in Keras.
        finite: Watch that warns once about weights that are nan or inf.
    """

    model: keras.Model
    strategy: Strategy
    steps: Steps
    rank: Rank
    guard: bool
    probe: bool
    steps_per_execution: int
    record: FitRecord
    saved: FitCheckpoints | None = None
    losses: LossWatch | None = None
    finite: FiniteWatch = field(default_factory=FiniteWatch)

    def fit(self, plan: FitPlan) -> keras.callbacks.History:
        """Train as `plan` says; return Keras's History. Raises what `Trainer.fit` raises."""
        with ExitStack() as blocks:
            position = None
            if self.saved is not None:
                facts = fit_facts(self.record.config, plan, self.model)
                position = blocks.enter_context(self.saved.opened(plan.initial_epoch, facts))
            elif self.record.run_dir is not None:
                blocks.callback(self.record.run_dir.release)
            show = blocks.enter_context(showing(plan.verbose, self.rank))
            # Inside, so that the end of the run is logged while it still owns the folder.
            blocks.enter_context(self.record.events.watching())
            blocks.enter_context(self.record.profile.of_fit(position.steps if position else 0))
            return self._fit(plan, position, show)

    def _fit(
        self, plan: FitPlan, resumed: FitPosition | None, show: Show | None
    ) -> keras.callbacks.History:
        """Train from the position `resumed`; None: from the beginning."""
        plan.train.reset()
        together = self.strategy.saves_together
        own = callbacks_of_rank(plan.callbacks, self.rank.is_first, together)
        written = written_by_first(plan.callbacks, together)
        if resumed is not None and self.rank.is_first:
            continue_files(own, resumed.epoch)
        callbacks = keras.callbacks.CallbackList(
            failing_together(plan.callbacks, own, ALL_RANKS, written),
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
        # A callback may have restored state on rank 0 alone: all ranks continue with rank 0's.
        initial_epoch = int(self.model._initial_epoch or plan.initial_epoch)
        first = int(ALL_RANKS.broadcast(initial_epoch, 0, "hvdtrain_initial_epoch"))
        self.model._initial_epoch = None  # Not for the next fit.
        if self.saved is None:
            self.record.in_run_dir(lambda run_dir: run_dir.begin(first))
            self.record.in_run_dir(lambda run_dir: run_dir.lock())
        self.strategy.broadcast(self.model, without=seed_variables(self.model))
        begin = resumed or FitPosition(first)
        self.record.write_config(plan.train, plan.epochs)
        if not begin.stopped and begin.epoch < plan.epochs:
            self.record.begin_events(plan.train, plan.epochs, begin, show)
        if resumed is not None:
            self.record.announce(resumed.describe(plan.epochs))
            if not resumed.stopped and resumed.epoch < plan.epochs:
                with self._reading_again():
                    self._skip(plan, first, resumed)
            # Within an epoch, only after the data has been skipped; but nothing follows the last epoch.
            if resumed.step == 0 or resumed.epoch >= plan.epochs:
                self._restore()
        logs: Logs = {}
        stragglers = StragglerWatch()
        for epoch in range(begin.epoch, 0 if begin.stopped else plan.epochs):
            logs = self._epoch(plan, epoch, callbacks, begin, show)
            times = stragglers.look(epoch)
            if times:
                self.record.events.note("ranks", epoch=epoch + 1, **times)
            stopped = any_rank(bool(self.model.stop_training), "stop")
            if self.saved is not None:
                last = stopped or epoch + 1 == plan.epochs
                # Look even if none is due: an epoch may have few steps, and its validation may take long.
                ends = not last and self.saved.should_stop(now=True)
                with in_phase("saving"):
                    after = FitPosition(epoch + 1, stopped=stopped)
                    self.saved.save(self.model, {}, after, last or ends)
                if ends:
                    raise self.saved.preempted()
            if stopped:
                break
        if plan.epochs > first and self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        with backups_kept(own):
            callbacks.on_train_end(logs)
            if self.guard and plan.epochs > first:
                self._check(self.strategy.check, "at the end of training", epoch_ends=True)
            if self.record.run_dir is not None:
                self.record.in_run_dir(lambda run_dir: run_dir.keep())
                self.strategy.save(self.model, self.record.run_dir.model)
        return self.model.history

    def evaluate(
        self, source: Source, everyones: Sequence[keras.callbacks.Callback], verbose: int
    ) -> Logs:
        """Return the loss and metrics over the whole of `source`, on every rank.

        Args:
            source: Data to evaluate on.
            everyones: The user's callbacks, the same list on every rank.
            verbose: What to print; see `resolve_verbose`.

        Raises:
            UsageError: If the data has no batches.
        """
        own = callbacks_of_rank(everyones, self.rank.is_first)
        callbacks = keras.callbacks.CallbackList(
            failing_together(everyones, own, ALL_RANKS),
            model=self.model,
            epochs=1,
            steps=source.steps_per_epoch,
            verbose=verbose,
        )
        with showing(verbose, self.rank) as show:
            progress = Progress(verbose, show, "Evaluation", source.steps_per_epoch)
            logs = self._evaluate(source, callbacks, everyones, progress)
            assert logs is not None
            progress.end(logs)
        return logs

    def _epoch(
        self,
        plan: FitPlan,
        epoch: int,
        callbacks: keras.callbacks.CallbackList,
        begin: FitPosition,
        show: Show | None,
    ) -> Logs:
        """Train and validate one epoch, the first one from `begin` on; return its logs, those of all workers."""
        is_first = epoch == begin.epoch + (begin.trained is not None)
        if epoch != begin.epoch:
            begin = FitPosition(epoch)
        title = f"Epoch {epoch + 1}/{plan.epochs}"
        steps = plan.train.steps_per_epoch
        progress = Progress(plan.verbose, show, title, steps, begin.step, epoch + 1)
        self.strategy.reset_metrics(self.model)
        callbacks.on_epoch_begin(epoch)
        if begin.trained is None:
            logs, done = self._train(plan, begin, callbacks, progress, is_first)
        else:
            self._restore()
            logs, done = dict(begin.trained), begin.step
        progress.stop()
        if plan.validates_after(epoch):
            logs |= self._validate(plan, epoch, done, logs, callbacks, show)
        if self.guard:
            self._check(self.strategy.check, f"after epoch {epoch + 1}", epoch_ends=True)
        with self.strategy.as_one_process(self.model):
            callbacks.on_epoch_end(epoch, logs)
        progress.end(logs)
        self.record.write_epoch(epoch, logs, plan.validation is not None, progress)
        return logs

    def _train(
        self,
        plan: FitPlan,
        begin: FitPosition,
        callbacks: keras.callbacks.CallbackList,
        progress: Progress,
        is_first: bool,
    ) -> tuple[Logs, int]:
        """Run the steps of one epoch from `begin` on; return its logs, those of all workers, and its steps.

        Args:
            is_first: No step of this fit was run before in this process.
        """
        epoch, done, skip = begin.epoch, begin.step, begin.step
        if self.strategy.part.index:
            # As in Keras, what a callback has added to the metrics by now (model.evaluate) counts: on one rank only.
            self.strategy.reset_metrics(self.model)
        shares = epoch_shares(plan.train, epoch, self.strategy.part, skip=skip)
        if self.saved is not None:
            self.saved.seen = 0
        if skip:
            with self._reading_again():
                seen = None if plan.train.agreed else checksum_of(itertools.islice(shares, skip))
                first = list(itertools.islice(shares, 1))
            if self.probe and first:  # Before the state is restored, which the probe may change.
                self.steps.probe(first[0])
            shares = itertools.chain(first, shares)
            # After on_epoch_begin: it ran for this epoch before the checkpoint, and may now have changed state again.
            self._restore(within_epoch=True)
            if self.saved is not None and seen is not None:
                self.saved.require_seen(seen)
        # As in Keras, an epoch that is stopped before it begins has one step.
        stopped = any_rank(bool(self.model.stop_training), "stop")
        step_logs: Logs = {}
        share: Share | None = None
        global_batches = need_global_batches(plan.callbacks, TRAIN_METHODS)
        saving = save_within_epochs(plan.callbacks, self.record.config["sync"])
        self.record.events.begin_steps()
        # Ungrouped where ranks read parts of their own, as one rank could group steps that another cannot.
        together = 1 if isinstance(plan.train, ShardedSource) else self.steps_per_execution
        groups = iter(lambda: list(itertools.islice(shares, together)), [])
        for group in self.record.profile.steps(groups):
            if self.saved is not None and done > skip:
                self._save_if_due(self.saved, step_logs, epoch, done)
            if self.losses is not None:
                self.losses.look()
            if self.probe and done == 0 and is_first:
                self.steps.probe(group[0])
            callbacks.on_train_batch_begin(done)
            for alike in grouped(group, self.strategy.part.count):
                step_logs = self.steps.train(alike)
            share = group[-1]
            if self.losses is not None:
                self.losses.add(epoch, done + len(group) - 1, len(group), step_logs, share)
            examples = sum(s.global_examples for s in group)
            progress.step(len(group), examples, step_logs)
            facts = partial(self.record.step_facts, epoch, done + len(group))
            self.record.events.count(len(group), examples, step_logs, facts)
            with (
                self._shown(step_logs, share, global_batches) as shown,
                self.strategy.as_one_process(self.model) if saving else nullcontext(),
            ):
                callbacks.on_train_batch_end(done + len(group) - 1, shown)
            if self.guard and done == skip and is_first:
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
        facts = partial(self.record.step_facts, epoch, done)
        self.record.events.count(0, 0, step_logs, facts, last=True)
        logs = self.strategy.logs(self.model, step_logs, share)
        self.strategy.end_epoch(self.model)
        return logs, done

    def _validate(
        self,
        plan: FitPlan,
        epoch: int,
        done: int,
        trained: Logs,
        callbacks: keras.callbacks.CallbackList,
        show: Show | None,
    ) -> Logs:
        """Return the logs of the validation after `epoch`. Raises Preempted if the job was told to end meanwhile.

        Args:
            done: Steps of the epoch.
            trained: Logs of these steps.
        """
        assert plan.validation is not None
        ends = None if self.saved is None else self.saved.ends_validation()
        progress = Progress(0, show, "Validation", plan.validation.steps_per_epoch)
        found = self._evaluate(plan.validation, callbacks, plan.callbacks, progress, ends)
        progress.leave()
        if found is None:
            assert self.saved is not None
            with in_phase("saving"):
                self.saved.save(
                    self.model, {}, FitPosition(epoch, done, trained=trained), last=True
                )
            raise self.saved.preempted()
        return {f"val_{name}": value for name, value in found.items()}

    def _evaluate(
        self,
        source: Source,
        callbacks: keras.callbacks.CallbackList,
        everyones: Sequence[keras.callbacks.Callback],
        progress: Progress,
        ends: Callable[[int], bool] | None = None,
    ) -> Logs | None:
        """Return the logs over `source`, leaving the metrics with the state merged over all workers.

        Args:
            ends: Tells, for the number of batches so far, whether to end here; the result is then None.
        """
        self.model.stop_evaluating = False
        source.reset()
        callbacks.on_test_begin()
        self.strategy.reset_metrics(self.model)
        stopped = any_rank(bool(self.model.stop_evaluating), "stop")
        step_logs: Logs = {}
        share: Share | None = None
        ended = False
        global_batches = need_global_batches(everyones, TEST_METHODS)
        for step, share in enumerate(epoch_shares(source, 0, self.strategy.part)):
            if self.probe and step == 0:
                self.steps.probe_test(share)
            callbacks.on_test_batch_begin(step)
            step_logs = self.steps.test(share)
            progress.step(1, share.global_examples, step_logs)
            self.record.events.validate(step + 1)
            with self._shown(step_logs, share, global_batches) as shown:
                callbacks.on_test_batch_end(step, shown)
            ended = ends is not None and ends(step + 1)
            if ended or stopped:
                break
            if global_batches and any_rank(bool(self.model.stop_evaluating), "stop"):
                break
        if share is None:
            raise UsageError("The evaluation data has no batches: nothing to evaluate on")
        self.steps.finish()
        # In Keras's order.
        logs = dict(sorted(self.strategy.logs(self.model, step_logs, share).items()))
        # Also where it ends early: a callback may have exchanged the weights in on_test_begin.
        callbacks.on_test_end(logs)
        return None if ended else logs

    # Helpers of these loops.

    def _skip(self, plan: FitPlan, first: int, resumed: FitPosition) -> None:
        """Advance the data by what a fit that began with epoch `first` has read before `resumed`."""
        part = self.strategy.part
        # In this order, as both may draw from the same random generator.
        for epoch in range(first, resumed.epoch + (resumed.trained is not None)):
            plan.train.skip([epoch], part.index, part.count)
            if epoch < resumed.epoch and plan.validates_after(epoch):
                assert plan.validation is not None
                plan.validation.reset()
                plan.validation.skip([0], part.index, part.count)

    def _reading_again(self) -> AbstractContextManager[None]:
        assert self.saved is not None
        return self.saved.reading_again()

    def _restore(self, within_epoch: bool = False) -> None:
        assert self.saved is not None
        self.saved.give(self.model, within_epoch)

    def _save_if_due(self, saved: FitCheckpoints, step_logs: Logs, epoch: int, done: int) -> None:
        """Save a checkpoint if one is due.

        Raises:
            Preempted: If the job was asked to stop.
            WorkersChanged: If hosts have joined or left an elastic job.
        """
        ends = saved.should_stop()
        if ends or saved.is_due():
            self.steps.finish()
            # No checkpoint may hold metrics that a loss of nan has spoilt; and right after a rewind, a new checkpoint
            # would repeat the restored one under another number.
            rewound = self.losses is not None and self.losses.look(now=True)
            if ends or not rewound:
                with in_phase("saving"):
                    saved.save(self.model, step_logs, FitPosition(epoch, done), last=ends)
        if ends:
            raise saved.preempted()

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
        """Yield the logs for callbacks: with `globally`, those of the epoch so far, with the metrics, over all workers.

        Afterwards this rank's own metrics continue. If a callback has changed them (reset_metrics, evaluate), they
        continue as in one process: from the first worker's state, while the others start from zero.
        """
        # One worker may be several ranks (pipeline stages), of which only one has the losses.
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


def callbacks_with_history(
    own: Sequence[keras.callbacks.Callback], callbacks: keras.callbacks.CallbackList
) -> list[keras.callbacks.Callback]:
    """Return this rank's callbacks as the user gave them, plus the History that Keras has added."""
    history = [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.History)]
    return [*own, *(c for c in history if c not in own)]


def predict(
    steps: Steps, strategy: Strategy, source: Source, progress: Progress, probe: bool
) -> Any:
    """Return the model's outputs for all examples of `source`, in the order of the data, on every rank.

    Args:
        steps: Steps of the model.
        strategy: Strategy that gathers the outputs.
        source: Data to predict on.
        progress: Progress display of the pass.
        probe: Whether to warn of outputs that depend on the other examples of a batch.
    """

    def outputs() -> Iterator[tuple[Share, Any]]:
        for number, share in enumerate(epoch_shares(source, 0, strategy.part)):
            if probe and number == 0:
                steps.probe_predict(share)
            yield share, steps.predict(share)
            progress.step(1, share.global_examples, {})

    found = strategy.gather(outputs())
    progress.end({})
    return found
