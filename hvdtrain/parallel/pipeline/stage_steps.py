"""The steps of one stage: forward and backward passes of micro-batches, in the order of a schedule.

A micro-batch's forward pass is one compiled function under a tape of its own, which keeps what the backward pass needs
(including dropout masks) until then. Losses are weighted by examples / global examples, so the gradients of all
micro-batches of all ranks add up to that of the global batch; they are reduced and applied once. A stage differentiates
its own additions to the loss (weight penalties, add_loss) itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.metrics import read_state, write_state
from hvdtrain.collectives.sparse import add_slices, common_indices
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.data import Share
from hvdtrain.errors import warn_user
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.variables import (
    computed_in_half,
    identity,
    tf_variable,
)
from hvdtrain.parallel.pipeline.micro_batch import MicroBatch, micro_batches
from hvdtrain.parallel.pipeline.normalized_losses import LateLosses
from hvdtrain.parallel.pipeline.schedule import (
    Pass,
    all_forward_then_backward,
    one_forward_one_backward,
)
from hvdtrain.parallel.pipeline.stage_compute import Passes
from hvdtrain.parallel.pipeline.stage_messages import Exchange, with_gradients
from hvdtrain.parallel.pipeline.stages import Stage
from hvdtrain.strategies.idle_ranks import take_over
from hvdtrain.strategies.losses import make_exact
from hvdtrain.strategies.step_metrics import StepMetrics
from hvdtrain.strategies.strategy import Logs, Steps


@dataclass(frozen=True)
class LastStageMetrics:
    """What all stages know about the losses and metrics of the last one.

    Attributes:
        names: Names of the losses and metrics.
        late: Whether a loss is divided by a count over all micro-batches, so that no backward pass can begin before
            all forward passes are done.
    """

    names: tuple[str, ...] = ()
    late: bool = False


@dataclass(frozen=True)
class _Open:
    """A forward pass that waits for its backward pass.

    Attributes:
        received: A tf.TensorSpec for each tensor received, for any number of examples.
        found: The last stage's logs, or `ForwardResult`.
    """

    tape: tf.GradientTape
    received: list[tf.TensorSpec]
    sources: list[Any]
    sent: list[Any]
    losses: list[Any]
    found: Any


class PipelineSteps(Steps):
    """Runs shares through one stage of a built and compiled model.

    Args:
        stage: Stage of this rank, with a compiled model.
        exchange: Messages to and from the neighbouring stages.
        ranks: Ranks that hold the same stage.
        count: Number of micro-batches of a share.
        measured: Losses and metrics of the last stage.

    Attributes:
        count: The same; may be changed between traces.
    """

    def __init__(
        self,
        stage: Stage,
        exchange: Exchange,
        ranks: Communicator,
        count: int,
        measured: LastStageMetrics,
    ) -> None:
        self._stage = stage
        self._exchange = exchange
        self._ranks = ranks
        self.count = count
        self._names = list(measured.names)
        self._share = tf.Variable(1.0, trainable=False)
        self._schedule = all_forward_then_backward if measured.late else one_forward_one_backward
        self._once: frozenset[int] | None = None  # Rows made once; None: no gradient is sparse yet.
        self._late: LateLosses | None = None
        if stage.is_last and measured.late:
            self._late = LateLosses(stage, ranks)
        total = _none_asked if self._late is None else self._late.total
        half = computed_in_half(stage.model)
        self._step = Step(self._share, total, share_in_loss=True, half=half)
        if stage.is_last:
            make_exact(stage.model)
        metrics = metrics_of(stage.model)
        self._metrics = StepMetrics(metrics, self._share, self._warn, in_parts=True)
        self._passes = Passes(stage, self._names, self._late, self._metrics)

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares` in order; return the running logs of this copy on its first stage, {} on the others."""
        logs: Logs = {}
        for share in shares:
            logs = self._train(share)
        return self._metrics.logs(logs)

    def test(self, share: Share) -> Logs:
        """Update the metrics, which the last stage holds, with `share`."""
        parts = micro_batches(share, self.count)
        with self._weighing(share):
            found = self._forward(parts, "test")
            if self._late is not None:
                totals = self._late.reduce_divisors(found)
                for part, made in zip(parts, found, strict=True):
                    self._share.assign(part.weight)
                    self._passes.late_loss("test", made, totals, part)
        self._exchange.flush()
        return self._metrics.logs({})

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share` on the last stage, None on the others."""
        outputs = self._forward(micro_batches(share, self.count), "predict")
        self._exchange.flush()
        if not self._stage.is_last:
            return None
        flat = [tf.nest.flatten(output) for output in outputs]
        joined = [tf.concat(parts, axis=0) for parts in zip(*flat, strict=True)]
        return tf.nest.pack_sequence_as(outputs[0], joined)

    @property
    def in_memory(self) -> int:
        """Number of micro-batches of an only stage whose activations are in memory at once, at most."""
        return 1 if self._late is None else self.count

    def trace(self, data: Any) -> Any:
        """Return the graph of an only stage's passes of one micro-batch and of the update, which do not run.

        Args:
            data: (x, y, sample_weight) of tf.TensorSpec, with the number of examples of a micro-batch.
        """
        assert self._stage.count == 1, self._stage
        examples = tf.nest.flatten(data)[0].shape[0]

        def step(data: Any) -> None:
            structure = keras.utils.unpack_x_y_sample_weight(data)
            part = MicroBatch(structure, examples, 1.0, size="trace")
            opened = self._train_forward(0, part)
            if self._late is not None:
                totals = self._late.reduce_divisors([opened.found])
                opened = self._with_late_loss(opened, totals, part)
            gradients, _ = self._train_backward(0, part, opened, np.zeros(0), False)
            self._passes.apply(gradients, {})

        with in_step(self._step):
            return tf.function(step, autograph=False).get_concrete_function(data).graph

    def _warn(self, text: str) -> None:
        if self._ranks.rank() == 0:
            warn_user(text)

    def _forward(self, parts: Sequence[MicroBatch], kind: str) -> list[Any]:
        """Run forward passes that have no backward passes; return the last stage's results."""
        everything = []
        for number, part in enumerate(parts):
            received = self._exchange.receive_forward(number, part.size)
            self._share.assign(part.weight)
            sent, _, found = self._passes.forward(kind, received, part)
            if not self._stage.is_last:
                self._exchange.send_forward(sent, part.size)
            everything.append(found)
        return everything

    # One training step.

    def _train(self, share: Share) -> Logs:
        stage = self._stage
        parts = micro_batches(share, self.count)
        last = len(parts) - 1
        waiting: dict[int, _Open] = {}
        totals: Any = None
        total: list[Any] | None = None
        logs = np.zeros(0)
        with self._weighing(share):
            for action in self._schedule(stage.index, stage.count, len(parts)):
                number = action.micro_batch
                if action.kind is Pass.FORWARD:
                    waiting[number] = self._train_forward(number, parts[number])
                    continue
                if self._late is not None and totals is None:
                    totals = self._late.reduce_divisors(
                        [opened.found for opened in waiting.values()]
                    )
                opened = waiting.pop(number)
                if self._late is not None:
                    opened = self._with_late_loss(opened, totals, parts[number])
                if stage.is_last and number == last:
                    # Scalars during an epoch, for the message; its end collects array metrics as well.
                    logs = np.array([float(np.mean(value)) for value in opened.found])
                gradients, logs = self._train_backward(
                    number, parts[number], opened, logs, number == last
                )
                if self._once is None and _sparse(gradients):
                    x = _of_any_batch(parts[number].data[0]) if stage.own_inputs else None
                    self._once = self._passes.rows_made_once(opened.received, x)
                if total is None:
                    total = gradients
                else:
                    _add(total, gradients, self._once or frozenset())
                # Free the memory before the next micro-batch allocates its own.
                del gradients, opened
            self._apply(total or [])
        self._exchange.flush()
        take_over(stage.model, share, self._ranks)
        return dict(zip(self._names, logs, strict=True)) if not stage.index else {}

    def _train_forward(self, number: int, part: MicroBatch) -> _Open:
        received = self._exchange.receive_forward(number, part.size)
        self._share.assign(part.weight)
        sources = with_gradients(received, self._stage.received)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            sent, losses, found = self._passes.forward("train", received, part)
        if not self._stage.is_last:
            self._exchange.send_forward(sent, part.size)
        kept = with_gradients(sent, self._stage.sent)
        return _Open(tape, _of_any_batch(received), sources, kept, losses, found)

    def _with_late_loss(self, opened: _Open, totals: Any, part: MicroBatch) -> _Open:
        """Compute the loss of a micro-batch after its forward pass, under the same tape."""
        self._share.assign(part.weight)
        with opened.tape:
            loss, found = self._passes.late_loss("train", opened.found, totals, part)
        return replace(opened, losses=[loss], found=found)

    def _train_backward(
        self, number: int, part: MicroBatch, opened: _Open, logs: np.ndarray, with_logs: bool
    ) -> tuple[list[Any], np.ndarray]:
        """Return this stage's gradients of one micro-batch, and the running logs, which come with the last one."""
        gradients: list[Any] = []
        if not self._stage.is_last:
            gradients, found = self._exchange.receive_backward(
                number, part.size, len(self._names) if with_logs else 0
            )
            if with_logs:
                logs = found + self._own_logs()
        variables = [tf_variable(v) for v in self._stage.model.trainable_variables]
        sources = opened.sources
        found_gradients = opened.tape.gradient(
            [*opened.sent, *opened.losses],
            [*sources, *variables],
            output_gradients=[*gradients, *(tf.ones_like(loss) for loss in opened.losses)],
        )
        if self._stage.index:
            back = [
                tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)
                for source, gradient in zip(sources, found_gradients, strict=False)
            ]
            self._exchange.send_backward(back, logs)
        return found_gradients[len(sources) :], logs

    def _apply(self, gradients: list[Any]) -> None:
        """Update the weights; sparse gradients with the same rows on all ranks are summed without a gather."""
        once = {p: g for p, g in _sparse(gradients).items() if p in (self._once or ())}
        rows = common_indices(once, self._ranks)
        variables = self._stage.model.trainable_variables
        known = frozenset(identity(variables[place]) for place in rows)
        with in_step(replace(self._step, once=known)):
            self._passes.apply(gradients, rows)

    def _own_logs(self) -> np.ndarray:
        """Return what a stage before the last adds to the logs: its weight penalties, which are part of the loss."""
        logs = np.zeros(len(self._names))
        logs[self._names.index("loss")] = float(self._stage.model.get_metrics_result()["loss"])
        return logs

    @contextlib.contextmanager
    def _weighing(self, share: Share) -> Iterator[None]:
        """Weight losses and metrics by the share; restore the metrics of an idle rank, whose filler must not count."""
        self._metrics.begin_step()
        metrics = self._stage.model.metrics
        counted = read_state(metrics)
        with in_step(self._step):
            yield
        if not share.examples:
            write_state(metrics, counted)


def _none_asked(divisor: tf.Tensor) -> tf.Tensor:
    raise AssertionError("a loss divides by what was not known to be needed")


def _of_any_batch(tensors: Any) -> Any:
    """Return a tf.TensorSpec for each tensor in a structure, for any number of examples."""
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), tensors)


def _sparse(gradients: list[Any]) -> dict[int, tf.IndexedSlices]:
    return {p: g for p, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}


def _add(total: list[Any], gradients: list[Any], once: frozenset[int]) -> None:
    """Add `gradients` to `total`, releasing them one by one to save memory; `once`: see `Passes.rows_made_once`."""
    for place, gradient in enumerate(gradients):
        gradients[place] = None
        if isinstance(gradient, tf.IndexedSlices):
            total[place] = add_slices(total[place], gradient, place in once)
        elif gradient is not None:
            total[place] = total[place] + gradient
