"""The computation of one stage for one micro-batch: its layers, and its share of the loss and metrics.

Each pass is one compiled function per size of micro-batch. A tf.function returns no padding masks, so masks are
passed as separate tensors, to the next stage or to the losses of the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.sparse import Rows, are_made_once
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import added_losses, compute_loss, track_loss
from hvdtrain.keras_internals.variables import tf_variable
from hvdtrain.parallel.pipeline.micro_batch import MicroBatch
from hvdtrain.parallel.pipeline.normalized_losses import ForwardResult, LateLosses
from hvdtrain.parallel.pipeline.stage_messages import tensors_of
from hvdtrain.parallel.pipeline.stages import Stage
from hvdtrain.strategies.step_metrics import StepMetrics


class Passes:
    """The forward passes of a stage; on the last one with the losses, or with separate functions for late losses.

    Args:
        stage: Stage of this rank, with a compiled model.
        names: Names of the losses and metrics, which the last stage computes.
        late: Late losses of the last stage, if its losses cannot be computed in the forward pass.
        metrics: Metrics of the stage's model.
    """

    def __init__(
        self, stage: Stage, names: Sequence[str], late: LateLosses | None, metrics: StepMetrics
    ) -> None:
        self._stage = stage
        self._names = names
        self._late = late
        self._metrics = metrics
        self._functions: dict[Hashable, Callable[..., Any]] = {}

    def forward(
        self, kind: str, received: list[Any], part: MicroBatch
    ) -> tuple[list[Any], list[Any], Any]:
        """Run the forward pass of a micro-batch.

        Args:
            kind: "train", "test" or "predict".
            received: Tensors from the previous stage.
            part: The micro-batch.

        Returns:
            The tensors to send to the next stage; to train, the scaled loss as a list of at most one element; and on
            the last stage the running logs, the argument of `late_loss`, or to predict the model's outputs.
        """
        x, y, weight = part.data
        # One function for each size: Keras weights the losses of several outputs by the number of examples
        # only if that is known while tracing.
        function = self._function((kind, part.size), partial(self._forward, kind))
        if not self._stage.is_last:
            y = weight = None
        own_x = x if self._stage.own_inputs else None
        return function(received, own_x, y, weight, part.examples)

    def late_loss(
        self, kind: str, made: ForwardResult, totals: tf.Tensor, part: MicroBatch
    ) -> tuple[Any, list[Any]]:
        """Return the loss of a micro-batch from the result `made` of its forward pass, and the running logs."""
        _, y, weight = part.data
        function = self._function(("late", kind, part.size), partial(self._late_loss, kind))
        return function(made, totals, y, weight, part.examples)

    def rows_made_once(self, received: list[Any], x: Any) -> frozenset[int]:
        """Return the indices of the trainable variables whose rows are looked up once, for all examples of a batch.

        Args:
            received: A tf.TensorSpec for each tensor received, for any number of examples.
            x: Likewise, for the whole model's inputs.
        """
        variables = [tf_variable(v) for v in self._stage.model.trainable_variables]
        found: list[int] = []

        def forward(received: list[Any], x: Any) -> None:
            with tf.GradientTape() as tape:
                made = tf.nest.flatten(self._run(received, x, training=True))
            targets = [t for t in made if t is not None and t.dtype.is_floating]
            for place, gradient in enumerate(tape.gradient(targets, variables)):
                if isinstance(gradient, tf.IndexedSlices) and are_made_once(gradient):
                    found.append(place)

        tf.function(forward, autograph=False).get_concrete_function(received, x)
        return frozenset(found)

    def apply(self, gradients: list[Any], rows: Mapping[int, Rows]) -> None:
        """Reduce a step's gradients and update the weights.

        Args:
            gradients: One for each of the model's trainable variables; None where there is none.
            rows: Rows of the sparse gradients that are made once, the same on all ranks, by index in `gradients`.
        """
        variables = self._stage.model.trainable_variables
        present = tuple(place for place, g in enumerate(gradients) if g is not None)

        def update(found: list[Any]) -> None:
            known = [_with_rows(g, rows.get(p)) for g, p in zip(found, present, strict=True)]
            self._stage.model.optimizer.apply_gradients(
                zip(known, [variables[p] for p in present], strict=True)
            )

        function = self._function(("apply", present, tuple(rows.items())), update)
        function([gradients[p] for p in present])

    def _forward(
        self, kind: str, received: list[Any], x: Any, y: Any, weight: Any, examples: int
    ) -> Any:
        training = kind == "train"
        outputs, sent = self._run(received, x, training)
        if kind == "predict":
            return sent, [], outputs
        losses, found = self._losses(outputs, y, weight, examples, training)
        optimizer = self._stage.model.optimizer
        return sent, [optimizer.scale_loss(loss) for loss in losses if training], found

    def _late_loss(
        self,
        kind: str,
        made: ForwardResult,
        totals: tf.Tensor,
        y: Any,
        weight: Any,
        examples: int,
    ) -> Any:
        assert self._late is not None
        outputs, loss = self._late.loss(made, totals, y, weight)
        logs = self._logs(loss, outputs, y, weight, examples)
        return self._stage.model.optimizer.scale_loss(loss) if kind == "train" else loss, logs

    def _losses(
        self, outputs: Any, y: Any, weight: Any, examples: int, training: bool
    ) -> tuple[list[Any], Any]:
        """Return this stage's part of the loss ([] if none yet), and the last stage's logs or `ForwardResult`."""
        model = self._stage.model
        if not self._stage.is_last:
            own = [tf.cast(loss, tf.float32) for loss in added_losses(model)]
            losses = [tf.add_n(own)] if own else []
            track_loss(model, losses[0] if losses else 0.0, examples)
            return losses, []
        if self._late is not None:
            return [], self._late.count(outputs, y, weight)
        loss = compute_loss(model, y, outputs, weight, training)
        return [loss], self._logs(loss, outputs, y, weight, examples)

    def _logs(self, loss: Any, outputs: Any, y: Any, weight: Any, examples: int) -> list[Any]:
        """Update the loss and metrics with a micro-batch; return their running values."""
        model = self._stage.model
        track_loss(model, loss, examples)
        logs, _ = self._metrics.count(
            lambda: model.compute_metrics(None, y, outputs, sample_weight=weight),
            tf.nest.flatten(outputs)[0].shape[0],
        )
        return [logs[name] for name in self._names]

    def _run(self, received: list[Any], x: Any, training: bool) -> tuple[Any, list[Any]]:
        """Return the whole model's outputs on the last stage, and the tensors to send on the others."""
        stage = self._stage
        if stage.count == 1:
            return stage.model(x, training=training), []
        arrived = _with_masks(tensors_of(stage.received), received)
        inputs = []
        if stage.own_inputs:
            flat = graph_internals.flat_inputs(stage.whole, x)
            inputs = [flat[place] for place in stage.own_inputs]
        inputs += [arrived[place] for place in stage.used]
        made = iter(tf.nest.flatten(stage.model(inputs, training=training)))
        outputs = [next(made) if place is None else arrived[place] for place in stage.passed]
        if stage.is_last:
            return graph_internals.like_outputs(stage.whole, outputs), []
        sent = []
        for crossing, tensor in zip(stage.sent, outputs, strict=True):
            # TensorFlow gives no gradient for an argument that a function returns unchanged.
            sent.append(tf.identity(tensor))
            if crossing.masked:
                sent.append(tf.identity(graph_internals.mask_of(tensor)))
        return None, sent

    def _function(self, key: Hashable, run: Callable[..., Any]) -> Callable[..., Any]:
        if key not in self._functions:
            eager = self._stage.model.run_eagerly
            compiled = partial(tf.function, reduce_retracing=True, autograph=False)
            self._functions[key] = run if eager else compiled(run)
        return self._functions[key]


def _with_rows(gradient: Any, rows: Rows | None) -> Any:
    """Return sparse gradients with static row indices, if these are known, instead of indices passed as arguments."""
    if rows is None:
        return gradient
    values = tf.ensure_shape(gradient.values, [len(rows), *gradient.values.shape[1:]])
    indices = tf.constant(rows, gradient.indices.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _with_masks(places: list[Any], received: list[Any]) -> list[Any]:
    """Return the tensors among what was received, each with its mask attached."""
    tensors: list[Any] = []
    for (_, mask), value in zip(places, received, strict=True):
        if mask:
            graph_internals.give_mask(tensors[-1], value)
        else:
            tensors.append(value)
    return tensors
