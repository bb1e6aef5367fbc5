"""The compiled training, test and prediction steps of a model on one rank's share of each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.collectives.step_context import Step, in_step, without_others
from hvdtrain.data import Share
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.keras_internals.compiled_losses import needs_whole_batch, own_losses
from hvdtrain.keras_internals.corrections import in_clusters
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.models import keeps_rows, optimizers_of, overridden, trains_by_keras
from hvdtrain.keras_internals.optimizers import is_scaled, step_counts
from hvdtrain.keras_internals.variables import (
    computed_in_half,
    identity,
    optimizer_variables,
    untracked_variables,
    values_kept,
    variable_name,
    without,
)
from hvdtrain.strategies import batch_dependence, complaints
from hvdtrain.strategies.data_dependence import with_decision_warnings
from hvdtrain.strategies.idle_ranks import take_over
from hvdtrain.strategies.losses import TotalOfRanks, make_exact
from hvdtrain.strategies.probe import EXAMPLES, Verdict, counts_of, probe, state_of
from hvdtrain.strategies.skipped_steps import skipped_steps_of
from hvdtrain.strategies.state_logs import StateLogs
from hvdtrain.strategies.stateful_updates import grown_together
from hvdtrain.strategies.step_metrics import StepMetrics
from hvdtrain.strategies.strategy import Logs, Steps, in_order
from hvdtrain.strategies.trial import in_one_line, unchanged
from hvdtrain.strategies.value_probe import batch_statistics, kind_of_loss, predicts_together


def _of_size(step: Callable[[Any], Any], leading: tuple[int, ...]) -> Callable[[Any], Any]:
    def sized(leaf: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(leaf, [*leading, *leaf.shape[len(leading) :]])

    return lambda data: step(tf.nest.map_structure(sized, data))


def one_after_the_other(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that runs `step` on each slice of its data along the leading dimension; see `in_order`."""

    def steps(stacked: Any) -> Any:
        def run(number: Any) -> Any:
            return step(tf.nest.map_structure(lambda leaf: leaf[number], stacked))

        return in_order(tf.nest.flatten(stacked)[0].shape[0], run)

    return steps


class RankSteps(Steps):
    """Runs a built and compiled model on shares, each weighted by its part of the global batch.

    With one rank nothing is weighted: the steps are Keras's own.

    Args:
        model: Built and compiled model.
        ranks: Ranks that share each global batch.
        together: Whether they make each training step together; otherwise each trains alone on its share.
        copy: Ranks of the job that hold the parts of this rank's copy of the model, and read the same examples.

    Raises:
        UsageError: A loss needs the whole batch, and there are several ranks.
    """

    def __init__(
        self,
        model: keras.Model,
        ranks: Communicator,
        together: bool = True,
        copy: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._together = together
        self._copy = copy
        self._share = tf.Variable(1.0, trainable=False)
        self._share_value = 1.0
        self._probed = False
        own = overridden(model, "compute_loss", "test_step") or own_losses(model)
        self._test_probed = not own
        several = ranks.size() > 1
        self._predict_probed = not several
        self._context: Step | None = None
        self._test_context: Step | None = None
        self._summed: list[tf.Variable] = []
        self._averaged: list[tf.Variable] = []
        if several:
            if (complaint := needs_whole_batch(model)) is not None:
                raise UsageError(complaint)
            make_exact(model)
            self._context = Step(
                self._share,
                TotalOfRanks(self._ranks),
                # With loss scaling, every train_step passes its loss through scale_loss.
                share_in_loss=trains_by_keras(model) or all(map(is_scaled, optimizers_of(model))),
                half=computed_in_half(model),
            )
            self._test_context = self._context
        train, test = model.train_step, model.test_step
        if model.jit_compile:
            train = in_clusters(train)
        self._told: set[str] = set()
        self._metrics = metrics_of(model)
        self._train_metrics = StepMetrics(self._metrics, self._share, self._warn)
        self._test_metrics = StepMetrics(self._metrics, self._share, self._warn)
        self._train_logs = StateLogs(model, train, self._ranks)
        self._test_logs = StateLogs(model, test, self._ranks)
        if several:
            if together:
                train = with_decision_warnings(model, train, self._warn)
            train = self._growing(self._train_metrics.over(train))
            test = self._test_metrics.over(test)
        if (skipped := skipped_steps_of(model)) is not None:
            train = skipped.around(train)
        self._train_step = train
        self._train = self._compiled(train)
        self._train_several = self._compiled(one_after_the_other(train), dimensions=2)
        self._test_step = test
        self._test = self._compiled(test)
        self._predict = self._compiled(model.predict_step)

    def _growing(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `step` so that variables found by the probe to grow by sums or means grow alike on all ranks."""
        return lambda data: grown_together(
            self._summed, self._averaged, self._ranks, lambda: step(data)
        )

    def _compiled(self, step: Callable[[Any], Any], dimensions: int = 1) -> Callable[[Any], Any]:
        """Compile `step`, whose data has `dimensions` leading dimensions that all tensors share."""
        if self._model.run_eagerly:
            return step
        compiled: dict[tuple[int, ...], Callable[[Any], Any]] = {}

        def run(data: Any) -> Any:
            # One function for each number of examples, of which there are few: Keras weights the losses of several
            # outputs by that number only if it is known while tracing.
            leading = tuple(tf.nest.flatten(data)[0].shape[:dimensions])
            if leading not in compiled:
                compiled[leading] = tf.function(
                    _of_size(step, leading), reduce_retracing=True, autograph=False
                )
            return compiled[leading](data)

        return run

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares` in order; return this rank's running logs, as scalar tensors."""
        if len(shares) == 1:
            logs = self._run(self._train, shares[0], self._context, self._together)
            if self._together:
                take_over(self._model, shares[0], self._ranks)
        else:
            data = [share.data for share in shares]
            stacked = tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *data)
            several = replace(shares[0], data=stacked)
            logs = self._run(self._train_several, several, self._context, self._together)
        return self._train_metrics.logs(logs, self._train_logs)

    def trace(self, data: Any) -> Any:
        """Return the tf.function graph of a training step, which does not run, on data like `data`.

        Args:
            data: (x, y, sample_weight) of tf.TensorSpec, with the number of examples of a share.
        """
        with in_step(self._context):
            return tf.function(self._train_step, autograph=False).get_concrete_function(data).graph

    def probe(self, share: Share) -> None:
        """Test, before the first step, whether the steps of the ranks add up to that of the whole batch. A collective.

        Raises:
            UsageError: On all ranks: they do not add up, or a step assigns to a weight directly.
        """
        if self._context is None or self._probed:
            return
        self._probed = True
        self._warn(batch_dependence.warning_by_nature(self._model))
        data = self._some_examples(share)
        # Per-row states of a stateful layer are not variables of the model, so the probe could not restore them.
        if data is None or keeps_rows(self._model):
            why_not = "a worker has a single example" if data is None else "a layer is stateful"
            self._warn(complaints.could_not_be_tried(self._model, why_not))
            return
        with without_others(self._copy):
            mine = probe(self._model, data, self._context)
        found = [Verdict(*each) for each in self._ranks.exchange(astuple(mine), "probe")]
        once = set.intersection(*(set(each.once) for each in found))
        variables = self._model.trainable_variables
        looked_up = frozenset(identity(variables[place]) for place in once)
        self._context = replace(self._context, once=looked_up)
        self._keep_in_step(found)
        if self._model.run_eagerly:
            self._look_for_decisions(data)
        judged = [each for each in found if each.as_mean is not None]
        if not judged:
            why_not = next((each.why_not for each in found if each.why_not), "")
            self._warn(why_not and complaints.could_not_be_tried(self._model, why_not))
            return
        if all(each.as_mean for each in judged):
            self._context = replace(self._context, checked=True)
        elif all(each.as_sum for each in judged) and trains_by_keras(self._model):
            self._context = replace(self._context, checked=True, loss_is_sum=True)
        else:
            raise UsageError(complaints.does_not_add_up(self._model, judged))
        self._test_probed = self._test_probed or overridden(self._model, "test_step") is None
        self._use_in_tests(self._context)
        self._warn_of_statistics(self._model.train_step, data)

    def probe_test(self, share: Share) -> None:
        """Test, before the first test step, how losses and means of the user's depend on the batch. A collective.

        `probe` comes too late: a model may be evaluated before it is trained, or by a process that does not train.
        """
        if self._test_context is None or self._test_probed:
            return
        data = self._some_examples(share)
        if data is None or keeps_rows(self._model):
            return
        self._test_probed = True
        self._warn_of_statistics(self._model.test_step, data)
        if overridden(self._model, "test_step") is not None:
            return  # Its loss may be another.
        with without_others(self._copy):
            mine = kind_of_loss(self._model, data, self._test_context)
        kinds = {kind for kind in self._ranks.exchange(mine, "loss") if kind}
        if kinds in ({"mean"}, {"sum"}):
            is_sum = kinds == {"sum"}
            self._use_in_tests(replace(self._test_context, checked=True, loss_is_sum=is_sum))
        elif kinds:
            self._warn(complaints.loss_of_parts(self._model))

    def _warn_of_statistics(self, run: Callable[[Any], Any], data: Any) -> None:
        assert self._context is not None
        with without_others(self._copy):
            names = batch_statistics(self._model, data, self._context, run)
        for name in names:
            self._warn(complaints.no_mean(name))

    def _use_in_tests(self, step: Step) -> None:
        """Weight the losses of test steps as `step` says, also of those traced before."""
        assert self._test_context is not None
        if step.loss_is_sum != self._test_context.loss_is_sum:
            self._test = self._compiled(self._test_step)
        self._test_context = step

    def _look_for_decisions(self, data: Any) -> None:
        """Trace the step of a model that runs eagerly, since decisions are visible only in a graph."""
        step = with_decision_warnings(self._model, self._model.train_step, self._warn)
        try:
            with unchanged(self._model), in_step(self._context):
                tf.function(step, autograph=False).get_concrete_function(data)
        except UsageError:
            raise
        except Exception as error:
            self._warn(complaints.cannot_be_traced(self._model, in_one_line(error)))

    def _keep_in_step(self, found: Sequence[Verdict]) -> None:
        """Choose how variables that a step changes without a gradient stay equal, by the findings of all ranks."""
        state = state_of(self._model)
        summed = set.intersection(*(set(each.summed) for each in found))
        averaged = set.intersection(*(set(each.averaged) for each in found))
        changed = set.union(*({*each.summed, *each.averaged, *each.unclear} for each in found))
        unclear = sorted(changed - summed - averaged)
        self._summed = [state[place] for place in sorted(summed)]
        self._averaged = [state[place] for place in sorted(averaged)]
        counts = counts_of(self._model)
        counted = set.intersection(*(set(each.counted) for each in found))
        for metrics in (self._train_metrics, self._test_metrics):
            metrics.count_as_sums([counts[place] for place in counted])
        if unclear:
            paths = {identity(v): variable_name(v) for v in self._model.variables}
            names = [paths.get(id(state[place]), state[place].name) for place in unclear]
            trained = {variable_name(v) for v in self._model.trainable_variables}
            if by_hand := [name for name in names if name in trained]:
                raise UsageError(complaints.assigned(self._model, by_hand[0]))
            untracked = {id(v) for v in untracked_variables(self._model)}
            kept = [
                name
                for name, place in zip(names, unclear, strict=True)
                if id(state[place]) in untracked
            ]
            self._warn(complaints.averages([name for name in names if name not in kept]))
            self._warn(complaints.kept_apart(kept))

    def _some_examples(self, share: Share) -> Any:
        """Return a few examples of this rank, or of all ranks if one has too few; None if there is only one.

        A collective.
        """
        data = tf.nest.map_structure(lambda leaf: leaf[: share.examples], share.data)
        leaves = tf.nest.flatten(data)
        shapes = [[leaf.dtype.name, *leaf.shape[1:]] for leaf in leaves]
        everyone = self._ranks.exchange([share.examples, shapes], "probe_examples")
        least = min(examples for examples, _ in everyone)
        # Strings cannot be gathered, and a user's own shards may have other shapes.
        travel = all(theirs == shapes for _, theirs in everyone) and "string" not in str(shapes)
        if least < EXAMPLES and travel:
            gathered = [
                self._ranks.allgather(leaf, f"hvdtrain_probe_{i}") for i, leaf in enumerate(leaves)
            ]
            # Each rank tries different examples.
            sizes = [examples for examples, _ in everyone]
            first, least = sum(sizes[: self._ranks.rank()]), sum(sizes)
            gathered = [tf.roll(leaf, -first, axis=0) for leaf in gathered]
            data = tf.nest.pack_sequence_as(data, gathered)
        rows = min(EXAMPLES, least)
        return tf.nest.map_structure(lambda leaf: leaf[:rows], data) if rows > 1 else None

    def _warn(self, text: str | None) -> None:
        if text and text not in self._told and self._ranks.rank() == 0:
            self._told.add(text)
            warn_user(text)

    def test(self, share: Share) -> Logs:
        """Update the metrics with `share`; return this rank's running logs."""
        logs = self._run(self._test, share, self._test_context)
        return self._test_metrics.logs(logs, self._test_logs)

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share` (on an idle rank, for its filler example)."""
        return self._predict(share.data)

    def probe_predict(self, share: Share) -> None:
        """Warn, before the first prediction, of outputs that depend on the other examples of a batch. A collective."""
        if self._predict_probed:
            return
        self._predict_probed = True
        data = self._some_examples(share)
        if data is None or keeps_rows(self._model):
            return
        assert self._test_context is not None
        with without_others(self._copy):
            together = predicts_together(self._model, data, self._test_context)
        self._warn(complaints.predicts_together(self._model) if together else None)

    def _run(
        self,
        step: Callable[[Any], Any],
        share: Share,
        context: Step | None,
        together: bool = True,
    ) -> Logs:
        if context is None:
            return step(share.data)
        value = share.examples / share.global_examples
        if value != self._share_value:
            self._share.assign(value)
            self._share_value = value
        if not together:
            return step(share.data) if share.examples else self._run_for_logs(step, share)
        # An idle rank takes part in the collectives with a filler example, which must not count.
        uncounted = [] if share.examples else state_variables(self._metrics)
        with in_step(context), values_kept(uncounted):
            return step(share.data)

    def _run_for_logs(self, step: Callable[[Any], Any], share: Share) -> Logs:
        """Train alone on a filler, of which nothing stays but what the optimizers keep of the number of their steps."""
        model = self._model
        found = [*model.variables, *untracked_variables(model), *state_variables(self._metrics)]
        counts = [v for optimizer in optimizers_of(model) for v in step_counts(optimizer)]
        with values_kept(without([*found, *optimizer_variables(model)], counts)):
            return step(share.data)
