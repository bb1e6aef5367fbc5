"""Training, test and prediction steps on several replicas in one process, through tf.distribute.

Each replica runs the model's own step on its rows of the global batch as a pure function (see
keras_internals/replica_scope.py), which returns gradients, new statistics, and the growth of the metrics. Their mean
or sum over the replicas is applied once: to each replica's copy of the variables (TPU), or on the one device that holds
them (central storage). So the optimizer sees the same as in one process with the whole batch: clipping, loss scaling,
accumulation and moving averages of weights need no special treatment.

A batch that cannot be divided evenly, such as the last one of an epoch, is computed whole by each replica; the results
are equal and count once. That is exact for any model, but costs R times a replica's share of one step. Shapes are
static, so each size of batch has its own program.
As with ranks, two kinds of layers differ by design: BatchNormalization normalizes over a replica's rows (over all with
synchronized=True), and dropout draws other masks on each replica.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.metric_trials import EVEN_PARTS
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.collectives.statistics import SEED_STRIDE
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.data import Share
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.keras_internals import replica_scope
from hvdtrain.keras_internals.compiled_losses import needs_whole_batch, own_losses
from hvdtrain.keras_internals.metric_calls import Calls, metrics_of, watched
from hvdtrain.keras_internals.models import flat_logs, means_of, trains_by_keras
from hvdtrain.keras_internals.optimizers import require_gradients
from hvdtrain.keras_internals.replica_scope import ReplicaScope
from hvdtrain.keras_internals.variables import (
    computed_in_half,
    identity,
    seed_variables,
    tf_variable,
    unique,
)
from hvdtrain.strategies import batch_dependence
from hvdtrain.strategies.losses import make_exact
from hvdtrain.strategies.step_metrics import SummedMetrics
from hvdtrain.strategies.strategy import Logs, Steps, in_order

STATIC_SHAPES = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)
"""Without this option a TPU treats every dimension of its inputs as dynamic."""

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@dataclass
class Found:
    """The variables that a traced step changes; the program returns a tensor for each, in this order.

    Attributes:
        trained: Variables with a gradient.
        states: Other variables of the model, such as moving statistics.
        metrics: Variables of metrics.
    """

    trained: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)


class ReplicaSteps(Steps):
    """Runs a built and compiled model on shares that each hold a whole global batch.

    Args:
        model: Built and compiled model, whose variables are where the strategy keeps them.
        strategy: Strategy of tf.distribute.
        examples: Number of examples in the largest global batch.
        parameter_device: Device that holds all variables, which replicas only read. None: every replica has a copy of
            all variables of model and optimizer, and applies the reduced gradients to it.

    Raises:
        UsageError: A layer communicates through Horovod, or a loss needs the whole batch.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        examples: int,
        parameter_device: str | None,
    ) -> None:
        _require_own_collectives(model)
        self._model = model
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        if examples % self._replicas:
            warn_user(
                f"global_batch_size={examples} cannot be divided evenly between {self._replicas} replicas, so each "
                "computes the whole batch, and they are no faster than one: use a multiple of "
                f"{self._replicas}"
            )
        self._device = parameter_device
        self._on_replicas = parameter_device is None
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._summed = SummedMetrics(EVEN_PARTS)
        complaint = needs_whole_batch(model)
        if complaint is not None and self._replicas > 1:
            raise UsageError(complaint)
        if getattr(model, "optimizer", None) is not None and model.optimizer.built:
            make_exact(model)
            self._half = computed_in_half(model)
            warning = batch_dependence.warning_of_parts(
                model, "each replica's part of a batch", own_losses(model)
            )
            if warning is not None and self._replicas > 1 and self._divides(examples):
                warn_user(warning)
            if self._on_replicas:
                replica_scope.update_on_each_replica(model.optimizer)

    # The interface of Steps.

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, which hold equally many examples, in one call of TensorFlow."""
        return self._run("train_step", shares)

    def test(self, share: Share) -> Logs:
        """Update the metrics with `share`."""
        return self._run("test_step", [share])

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share`, in order."""
        outputs = self._program("predict_step", [share])(self._parts([share]))
        found = [
            self._strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(outputs)
        ]
        whole = not self._divides(share.examples)
        joined = [parts[0] if whole else tf.concat(parts, 0) for parts in found]
        return tf.nest.pack_sequence_as(outputs, joined)

    # From shares to the programs' arguments.

    def _divides(self, examples: int) -> bool:
        """Return whether a batch is divided between the replicas; otherwise each computes all of it."""
        return examples % self._replicas == 0

    def _parts(self, shares: Sequence[Share]) -> Any:
        """Return each replica's rows, of shape (rows, ...), or (steps, rows, ...) for several shares."""
        axis = 0 if len(shares) == 1 else 1
        divides = self._divides(shares[0].examples)

        def rows_of(*leaves: tf.Tensor) -> list[tf.Tensor]:
            leaf = leaves[0] if len(leaves) == 1 else tf.stack(leaves)
            return tf.split(leaf, self._replicas, axis) if divides else [leaf] * self._replicas

        data = [share.data for share in shares]
        with tf.device("CPU:0"):  # From there each device receives its own part.
            flat = [rows_of(*leaves) for leaves in zip(*map(tf.nest.flatten, data), strict=True)]

        def of_replica(context: tf.distribute.experimental.ValueContext) -> Any:
            replica = context.replica_id_in_sync_group
            return tf.nest.pack_sequence_as(data[0], [leaf[replica] for leaf in flat])

        return self._strategy.experimental_distribute_values_from_function(of_replica)

    def _run(self, step: str, shares: Sequence[Share]) -> Logs:
        return self._program(step, shares)(self._parts(shares))

    # The programs, which are traced once for each size of batch.

    def _program(self, step: str, shares: Sequence[Share]) -> Callable[..., Any]:
        key = (step, len(shares), shares[0].examples)
        if key not in self._compiled:
            # A new object each time: TensorFlow counts traces per function, and warns of many.
            if step == "predict_step":
                program = functools.partial(self._predictions)
            else:
                program = functools.partial(self._steps, step, len(shares), shares[0].examples)
            if not self._model.run_eagerly:
                program = tf.function(program, autograph=False)
            self._compiled[key] = program
        return self._compiled[key]

    def _predictions(self, parts: Any) -> Any:
        def predict(rows: Any) -> Any:
            with ReplicaScope([], 1):
                return self._model.predict_step(rows)

        return self._strategy.run(predict, args=(parts,), options=STATIC_SHAPES)

    def _steps(self, step: str, count: int, examples: int, parts: Any) -> Logs:
        """Run `count` steps on `examples` examples each, in order."""
        run = functools.partial(self._step, step, examples, parts)
        return run(None) if count == 1 else in_order(count, run)

    def _step(self, step: str, examples: int, parts: Any, number: Any) -> Logs:
        """Run one step, outside the replicas; `number` is the index of the share if there are several."""
        found, divides = Found(), self._divides(examples)
        states = [tf_variable(v).read_value() for v in state_variables(self._model.metrics)]

        def replica(rows: Any, states: list[tf.Tensor], *number: Any) -> Any:
            if number:
                rows = tf.nest.map_structure(lambda leaf: leaf[number[0]], rows)
            return self.on_replica(step, divides, rows, states, found, calls)

        shared = (states,) if number is None else (states, number)
        means, metrics = means_of(self._model), metrics_of(self._model)
        with (
            replica_scope.pure_steps(self._model),
            watched(means) as calls,
            watched(metrics) as updated,
        ):
            results = self._strategy.run(replica, (parts, *shared), options=STATIC_SHAPES)
        if divides and self._replicas > 1:
            self._summed.learn(updated.updates, examples // self._replicas)
        if not self._on_replicas:
            with tf.device(self._device):
                gradients = self._reduced(self._together(divides), results["gradients"])
                self._apply(gradients, self._reduced(SUM, results["states"]), found)
        for variable, value in zip(
            found.metrics, self._reduced(SUM, results["metrics"]), strict=True
        ):
            variable.assign(variable + value if _adds_up(variable) else value)
        values = self._model.get_metrics_result()
        logs = results["logs"]
        if set(logs) == set(values):
            return values
        return {name: self._strategy.reduce(MEAN, value, axis=None) for name, value in logs.items()}

    def on_replica(
        self,
        step: str,
        divides: bool,
        rows: Any,
        states: list[tf.Tensor],
        found: Found,
        calls: Calls,
    ) -> dict[str, Any]:
        """Run the model's `step` on one replica's rows, inside `pure_steps`.

        If replicas have their own copies of the variables, the reduced results are applied to this replica's copy;
        otherwise no variable changes.

        Args:
            step: Name of the model's method.
            divides: Whether `rows` are the replica's part of the batch, or all of it.
            rows: (x, y, sample_weight), with the rows along the leading dimension.
            states: States of all metrics.
            found: Filled with the variables that the step changes.
            calls: Calls so far of the model's mean metrics.

        Returns:
            gradients: Gradient of each of found.trained (unless applied).
            states: Tensors whose sum over the replicas is the new value of each of found.states (unless applied).
            metrics: Tensors whose sum over the replicas is the growth, or new value, of each of found.metrics.
            logs: Result of the step.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        mapping = [(v, _own_seed(v, replica)) for v in seed_variables(self._model)]
        metrics = state_variables(self._model.metrics)
        mapping += [
            (v, tf.zeros_like(state) if _adds_up(v) else state)
            for v, state in zip(metrics, states, strict=True)
        ]
        replicas = self._replicas if divides else 1
        # Losses ask the other replicas for their divisors, as with ranks.
        part = None if replicas == 1 else Step(1 / replicas, _total_of_replicas, share_in_loss=True)
        with ReplicaScope(mapping, replicas) as scope, in_step(part):
            logs = getattr(self._model, step)(rows)
        if step == "train_step":
            require_gradients(self._model, scope.handed_out)
        scope.require_known([*self._model.variables, *metrics])
        counted = {id(v) for v in metrics}
        others = [v for v in unique(self._model.variables) if id(v) not in counted]
        found.trained = [v for _, v in scope.handed_out]
        found.states = [v for v in others if scope.update_of(v) is not None]
        found.metrics = [v for v in metrics if scope.update_of(v) is not None]
        is_first = tf.equal(replica, 0)
        gradients = [gradient for gradient, _ in scope.handed_out]
        new = [_part(v, scope.update_of(v), self._replicas, is_first) for v in found.states]
        grown = [scope.update_of(v) for v in found.metrics]
        if divides:
            metric_parts = [
                _metric_part(v, value, self._replicas, is_first)
                for v, value in zip(found.metrics, grown, strict=True)
            ]
        else:  # All replicas have the same results, and only the first one's count.
            gradients = [_of_first(gradient, is_first) for gradient in gradients]
            weights = self._weights_of_means(calls, rows, scope)
            metric_parts = [
                _of_first(value * weights[id(v)] if id(v) in weights else value, is_first)
                for v, value in zip(found.metrics, grown, strict=True)
            ]
        if self._on_replicas:
            self._apply_everywhere(divides, gradients, new, found)
        return {
            **({} if self._on_replicas else {"gradients": gradients, "states": new}),
            "metrics": metric_parts,
            "logs": {n: tf.convert_to_tensor(value) for n, value in flat_logs(logs).items()},
        }

    def _together(self, divides: bool) -> tf.distribute.ReduceOp:
        """Return the reduction of the gradients: in Keras's own train_step each share is in the loss already."""
        return MEAN if divides and not trains_by_keras(self._model) else SUM

    def _weights_of_means(self, calls: Calls, rows: Any, scope: ReplicaScope) -> dict[int, Any]:
        """Return factors for the states of mean metrics that take one value for a whole batch, such as the loss.

        A divided batch updates them once on each replica, so an undivided one must weigh as much.
        """
        single = tf.nest.flatten(rows)[0].shape[0] == 1
        found: dict[int, Any] = {}
        for mean, updates in calls.updates:
            grown = scope.update_of(mean.count)
            if not isinstance(mean, keras.metrics.MeanMetricWrapper):
                weight = self._replicas if all(map(_is_scalar, updates)) else 1
            elif single or grown is None:  # A mean over rows, like most.
                continue
            else:
                weight = tf.where(tf.equal(grown, 1), tf.cast(self._replicas, grown.dtype), 1)
            found |= {id(mean.total): weight, id(mean.count): weight}
        return found

    # Applying the results of the replicas.

    def _apply_everywhere(
        self, divides: bool, gradients: list[Any], states: list[Any], found: Found
    ) -> None:
        """On a replica: apply the reduced results of all replicas to this replica's variables."""
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(self._together(divides), gradients) if gradients else []
        states = context.all_reduce(SUM, states) if states else []
        self._apply(gradients, states, found)

    def _apply(self, gradients: list[Any], states: list[Any], found: Found) -> None:
        for variable, value in zip(found.states, states, strict=True):
            variable.assign(value)
        if gradients:
            # Rounded to float16 as in one process, so that overflows, and the loss scale, are the same.
            rounded = [
                tf.cast(tf.cast(g, tf.float16), g.dtype) if identity(v) in self._half else g
                for g, v in zip(gradients, found.trained, strict=True)
            ]
            self._model.optimizer.apply_gradients(list(zip(rounded, found.trained, strict=True)))

    def _reduced(self, operation: Any, values: list[Any]) -> list[Any]:
        return [self._strategy.reduce(operation, value, axis=None) for value in values]


def _total_of_replicas(divisor: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(SUM, divisor)


def _adds_up(variable: Any) -> bool:
    return (variable.aggregation or "sum") == "sum"


def _metric_part(variable: Any, value: tf.Tensor, replicas: int, is_first: tf.Tensor) -> tf.Tensor:
    if _adds_up(variable):
        return value
    if variable.aggregation == "mean":
        return value / tf.cast(replicas, value.dtype)
    return _of_first(value, is_first)


def _of_first(value: Any, is_first: tf.Tensor) -> Any:
    if isinstance(value, tf.IndexedSlices):
        values = _of_first(value.values, is_first)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    return tf.where(is_first, value, tf.zeros_like(value))


def _is_scalar(update: tuple[Any, Any]) -> bool:
    """Return whether a mean was updated with one number and no weight."""
    args, kwargs = update
    given = dict(zip(("values", "sample_weight"), args, strict=False)) | kwargs
    return (
        given.get("sample_weight") is None and tf.convert_to_tensor(given["values"]).shape.rank == 0
    )


def _part(variable: Any, value: tf.Tensor, replicas: int, is_first: tf.Tensor) -> tf.Tensor:
    """Return this replica's part of the new value: averaged for floats (moving statistics), else the first one's."""
    value = tf.cast(value, tf_variable(variable).dtype)
    if value.dtype.is_floating:
        return value / tf.cast(replicas, value.dtype)
    if value.dtype == tf.bool:
        raise UsageError(
            f"The step changes the variable {variable.path!r} of type bool, which several replicas cannot add "
            "up: keep it as an integer, or use strategy='horovod'"
        )
    return _of_first(value, is_first)


def _own_seed(variable: Any, replica: Any) -> tf.Tensor:
    """Return a different seed for each replica; the first one's is unchanged."""
    seed = tf_variable(variable).read_value()
    offset = tf.cast(replica, tf.uint32) * tf.constant(SEED_STRIDE, tf.uint32)
    offset = tf.bitwise.bitwise_and(offset, tf.constant(0x7FFFFFFF, tf.uint32))
    return tf.bitwise.bitwise_xor(seed, tf.cast(offset, seed.dtype))


def _require_own_collectives(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "hvdtrain_synchronized", False):
            raise UsageError(
                f"Layer {layer.name!r} ({type(layer).__name__}) communicates through Horovod, and the replicas of one "
                "process are not its ranks: use keras.layers.BatchNormalization(synchronized=True)"
            )


@contextlib.contextmanager
def variables_on_replicas(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Create variables of which every replica of `strategy` has its own copy, and updates it by itself.

    Variables of metrics stay on the host; replicas return their growth.
    """
    plain = type(tf.Variable(0, trainable=False))

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        if arguments.get("synchronization") == tf.VariableSynchronization.ON_READ:
            names = ("initial_value", "trainable", "name", "dtype", "shape")
            with tf.device("CPU:0"):
                return plain(**{name: arguments.get(name) for name in names})
        arguments["aggregation"] = tf.VariableAggregation.NONE
        arguments["synchronization"] = tf.VariableSynchronization.AUTO
        return next_creator(**arguments)

    with strategy.scope(), tf.variable_creator_scope(create):
        yield
