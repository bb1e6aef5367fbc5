"""The steps of one stage: micro-batches one behind the other, forwards and backwards by a schedule.

A micro-batch's forward pass is one compiled function under a tape of its own, which keeps what the
backward pass needs (the masks of dropout, too) until it comes. Losses are weighted by examples /
global examples, so the gradients of all micro-batches of all ranks add up to the global batch's; they are reduced
and applied once. What a stage adds to the loss (penalties of its weights, add_loss) it differentiates itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data import Share
from hvdtrain.data.share import split
from hvdtrain.keras.compat import graph as compat_graph
from hvdtrain.keras.optimizer import OptimizerReducer
from hvdtrain.keras.variables import tf_variable, unique
from hvdtrain.metrics import state_variables
from hvdtrain.parallel.pipeline.exchange import Exchange, tensors_of
from hvdtrain.parallel.pipeline.schedule import Pass, one_forward_one_backward
from hvdtrain.parallel.pipeline.stages import Stage
from hvdtrain.strategies.losses import make_exact

Logs = dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a share.

    Attributes:
        data: x, y and sample weight, the last two None where there are none.
        examples: in it; 1, which counts nothing, on an idle rank.
        weight: examples / examples of the global batch.
        size: what decides on all shapes.
    """

    data: tuple[Any, Any, Any]
    examples: int
    weight: float
    size: Hashable


@dataclass(frozen=True)
class _Open:
    """A forward pass that waits for its backward pass."""

    tape: tf.GradientTape
    sources: list[Any]
    sent: list[Any]
    losses: list[Any]


def micro_batches(share: Share, count: int) -> list[MicroBatch]:
    """Return `share` in at most `count` parts, whose sizes differ by at most one example."""
    examples = max(share.examples, 1)
    count = min(count, examples)
    ends = [split(examples, part, count) for part in range(count)]
    sizes = [end - begin for begin, end in ends]
    structure = (*share.data, None, None)[:3]
    leaves = [tf.split(leaf, sizes) for leaf in tf.nest.flatten(share.data)]
    shapes = tuple(tuple(parts[0].shape[1:]) for parts in leaves)
    return [
        MicroBatch(
            data=_packed(structure, [parts[number] for parts in leaves]),
            examples=size,
            weight=size * min(share.examples, 1) / share.global_examples,
            size=(size, shapes),
        )
        for number, size in enumerate(sizes)
    ]


def _packed(structure: tuple[Any, Any, Any], leaves: list[Any]) -> tuple[Any, Any, Any]:
    present = [part for part in structure if part is not None]
    packed = iter(tf.nest.pack_sequence_as(present, leaves))
    x, y, weight = (None if part is None else next(packed) for part in structure)
    return x, y, weight


class PipelineSteps:
    """Runs shares through one stage of a built and compiled model.

    Args:
        stage: this rank's; its model is compiled.
        exchange: with its neighbours.
        reducer: of the model's optimizer, over the ranks that hold the same stage.
        count: micro-batches of a share.
        names: of the losses and metrics, which the last stage computes.
    """

    def __init__(
        self,
        stage: Stage,
        exchange: Exchange,
        reducer: OptimizerReducer,
        count: int,
        names: Sequence[str],
    ) -> None:
        self._stage = stage
        self._exchange = exchange
        self._reducer = reducer
        self._count = count
        self._names = list(names)
        self._share = tf.Variable(1.0, trainable=False)
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        if stage.is_last:
            make_exact(stage.model, reducer)
        reducer.share_is_in_loss = True

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, one after the other; return the running logs of this copy, on its first stage."""
        logs: Logs = {}
        for share in shares:
            logs = self._train(share)
        return logs

    def test(self, share: Share) -> Logs:
        """Update the metrics from `share`; the last stage holds them."""
        with self._weighing(share):
            for number, part in enumerate(micro_batches(share, self._count)):
                self._forward(number, part, self._test_pass)
        self._exchange.flush()
        return {}

    def predict(self, share: Share) -> Any:
        """Return the model's output for the examples of `share` on the last stage, None on the others."""
        outputs = [
            self._forward(number, part, self._predict_pass)
            for number, part in enumerate(micro_batches(share, self._count))
        ]
        self._exchange.flush()
        if not self._stage.is_last:
            return None
        flat = [tf.nest.flatten(output) for output in outputs]
        joined = [tf.concat(parts, axis=0) for parts in zip(*flat, strict=True)]
        return tf.nest.pack_sequence_as(outputs[0], joined)

    def finish(self) -> None:
        """Nothing is in flight: each step returns when it is done."""

    # One training step.

    def _train(self, share: Share) -> Logs:
        stage = self._stage
        parts = micro_batches(share, self._count)
        waiting: dict[int, _Open] = {}
        total: list[Any] | None = None
        found: list[Any] = []
        logs = np.zeros(0)
        with self._weighing(share):
            for action in one_forward_one_backward(stage.index, stage.count, len(parts)):
                number = action.micro_batch
                if action.kind is Pass.FORWARD:
                    waiting[number], found = self._train_forward(number, parts[number])
                    continue
                if stage.is_last and number == len(parts) - 1:
                    logs = np.array([float(value) for value in found])
                gradients, logs = self._train_backward(
                    number, parts[number], waiting.pop(number), logs, number == len(parts) - 1
                )
                if total is None:
                    total = gradients
                else:
                    _add(total, gradients)
                del gradients  # They would stay while the next micro-batch makes its own.
            self._apply(total or [])
        self._exchange.flush()
        return dict(zip(self._names, logs, strict=True)) if not stage.index else {}

    def _train_forward(self, number: int, part: MicroBatch) -> tuple[_Open, list[Any]]:
        received = self._exchange.receive_forward(number, part.size)
        self._share.assign(part.weight)
        sources = self._with_gradients(received)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            sent, losses, found = self._call(self._train_pass, received, part)
        if not self._stage.is_last:
            self._exchange.send_forward(sent, part.size)
        places = [c.differentiable and not mask for c, mask in tensors_of(self._stage.sent)]
        kept = [t for t, has_gradient in zip(sent, places, strict=True) if has_gradient]
        return _Open(tape, sources, kept, losses), found

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

    def _own_logs(self) -> np.ndarray:
        """What this stage, not the last, adds to the logs: its penalties belong to the loss."""
        logs = np.zeros(len(self._names))
        logs[self._names.index("loss")] = float(self._stage.model.get_metrics_result()["loss"])
        return logs

    def _apply(self, gradients: list[Any]) -> None:
        """Reduce the step's gradients over the ranks of this stage, and update the weights."""
        variables = self._stage.model.trainable_variables
        present = tuple(place for place, g in enumerate(gradients) if g is not None)
        function = self._function(
            ("apply", present),
            lambda found: self._stage.model.optimizer.apply_gradients(
                zip(found, [variables[p] for p in present], strict=True)
            ),
        )
        function([gradients[p] for p in present])

    # The passes of one micro-batch, as compiled functions.

    def _forward(self, number: int, part: MicroBatch, run: Callable[..., Any]) -> Any:
        """Take part in a forward pass without a backward pass; return what the last stage found."""
        received = self._exchange.receive_forward(number, part.size)
        self._share.assign(part.weight)
        sent, _, found = self._call(run, received, part)
        if not self._stage.is_last:
            self._exchange.send_forward(sent, part.size)
        return found

    def _call(self, run: Callable[..., Any], received: list[Any], part: MicroBatch) -> Any:
        x, y, weight = part.data
        # A function for each size: Keras weighs the losses of several outputs by the number of
        # examples only if it is known while tracing.
        function = self._function((run.__name__, part.size), run)
        if not self._stage.is_last:
            y = weight = None
        own_x = x if self._stage.own_inputs else None
        return function(received, own_x, y, weight, part.examples)

    def _train_pass(self, received: list[Any], x: Any, y: Any, weight: Any, examples: int) -> Any:
        outputs, sent = self._run(received, x, training=True)
        losses, found = self._losses(outputs, y, weight, examples, training=True)
        optimizer = self._stage.model.optimizer
        return sent, [optimizer.scale_loss(loss) for loss in losses], found

    def _test_pass(self, received: list[Any], x: Any, y: Any, weight: Any, examples: int) -> Any:
        outputs, sent = self._run(received, x, training=False)
        _, found = self._losses(outputs, y, weight, examples, training=False)
        return sent, [], found

    def _predict_pass(self, received: list[Any], x: Any, y: Any, weight: Any, examples: int) -> Any:
        del y, weight, examples
        outputs, sent = self._run(received, x, training=False)
        return sent, [], outputs

    def _losses(
        self, outputs: Any, y: Any, weight: Any, examples: int, training: bool
    ) -> tuple[list[Any], list[Any]]:
        """Return this stage's part of the loss, [] if it has none, and on the last stage the running logs."""
        model = self._stage.model
        if not self._stage.is_last:
            own = [tf.cast(loss, tf.float32) for loss in model.losses]
            losses = [tf.add_n(own)] if own else []
            compat_graph.track_loss(model, losses[0] if losses else 0.0, examples)
            return losses, []
        loss = compat_graph.compute_loss(model, y, outputs, weight, training)
        compat_graph.track_loss(model, loss, examples)
        logs = model.compute_metrics(None, y, outputs, sample_weight=weight)
        return [loss], [logs[name] for name in self._names]

    def _run(self, received: list[Any], x: Any, training: bool) -> tuple[Any, list[Any]]:
        """Return the whole model's outputs on the last stage, and what the others send."""
        stage = self._stage
        arrived = _with_masks(tensors_of(stage.received), received)
        inputs = []
        if stage.own_inputs:
            flat = compat_graph.flat_inputs(stage.whole, x)
            inputs = [flat[place] for place in stage.own_inputs]
        inputs += [arrived[place] for place in stage.used]
        made = iter(tf.nest.flatten(stage.model(inputs, training=training)))
        outputs = [next(made) if place is None else arrived[place] for place in stage.passed]
        if stage.is_last:
            return compat_graph.like_outputs(stage.whole, outputs), []
        sent = []
        for crossing, tensor in zip(stage.sent, outputs, strict=True):
            # A function that returns its own argument has no gradient of it.
            sent.append(tf.identity(tensor))
            if crossing.masked:
                sent.append(tf.identity(compat_graph.mask_of(tensor)))
        return None, sent

    def _with_gradients(self, received: list[Any]) -> list[Any]:
        places = tensors_of(self._stage.received)
        return [
            tensor
            for tensor, (crossing, mask) in zip(received, places, strict=True)
            if crossing.differentiable and not mask
        ]

    def _function(self, key: Hashable, run: Callable[..., Any]) -> Callable[..., Any]:
        if key not in self._functions:
            self._functions[key] = self._compiled(run)
        return self._functions[key]

    def _compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if self._stage.model.run_eagerly:
            return run
        function: Callable[..., Any] = tf.function(run, reduce_retracing=True, autograph=False)
        return function

    @contextlib.contextmanager
    def _weighing(self, share: Share) -> Iterator[None]:
        """Weigh losses by the share; let an idle rank's filler leave no trace in this rank's state."""
        model = self._stage.model
        kept = [] if share.examples else _state(model)
        values = [tf_variable(v).numpy() for v in kept]
        self._reducer.share = self._share
        try:
            yield
        finally:
            self._reducer.share = None
        for variable, value in zip(kept, values, strict=True):
            tf_variable(variable).assign(value)


def _state(model: keras.Model) -> list[Any]:
    return unique([*model.non_trainable_variables, *state_variables(model.metrics)])


def _with_masks(places: list[Any], received: list[Any]) -> list[Any]:
    """Return the tensors among what was received, each with its mask."""
    tensors: list[Any] = []
    for (_, mask), value in zip(places, received, strict=True):
        if mask:
            compat_graph.give_mask(tensors[-1], value)
        else:
            tensors.append(value)
    return tensors


def _add(total: list[Any], gradients: list[Any]) -> None:
    """Add `gradients` to `total` and empty them, one by one: memory for one sum more is all it takes."""
    for place, gradient in enumerate(gradients):
        gradients[place] = None
        if isinstance(gradient, tf.IndexedSlices):
            total[place] = _joined(total[place], gradient)
        elif gradient is not None:
            total[place] = total[place] + gradient


def _joined(total: Any, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The sum of two sparse gradients: rows of the same index add up."""
    return tf.IndexedSlices(
        tf.concat([total.values, slices.values], axis=0),
        tf.concat([total.indices, slices.indices], axis=0),
        slices.dense_shape,
    )
