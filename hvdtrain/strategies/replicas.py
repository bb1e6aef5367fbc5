"""Training, test and prediction steps on several replicas of one process, through tf.distribute.

Each replica runs the model's own step on its rows of the global batch, as a pure function (see
keras_internals/replica_scope.py): out come gradients, new statistics, and by how much the metrics grow. Their mean
or sum over the replicas is applied once: on each replica's copy of the variables (TPU), or on the one device that holds
them (central storage). So the optimizer sees what it would see in one process with the whole batch: clipping,
loss scaling, accumulation and moving averages of weights need nothing of their own.

All batches have one shape, the last one of an epoch too: what it lacks is filled up with examples that count zero.
Exceptions by nature, as over ranks: BatchNormalization normalises over a replica's rows, fillers included (over all
with synchronized=True), and dropout draws other masks on each replica.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.statistics import SEED_STRIDE
from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import replica_scope as replica_scope
from hvdtrain.keras_internals.losses import needs_whole_batch
from hvdtrain.keras_internals.models import overridden, symbolic_build, trains_by_keras
from hvdtrain.keras_internals.optimizers import is_distributed, require_gradients
from hvdtrain.keras_internals.replica_scope import EVEN, ReplicaScope
from hvdtrain.keras_internals.variables import seed_variables, tf_variable, unique
from hvdtrain.strategies.rows import Placement, place
from hvdtrain.strategies.strategy import Logs

STATIC_SHAPES = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)
"""Without this a TPU takes every dimension of its inputs for one that may change."""

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@dataclass
class Found:
    """Which variables a traced step changes; a program returns a tensor for each, in this order."""

    trained: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)


class ReplicaSteps:
    """Runs a built and compiled model on shares that each hold a whole global batch.

    Args:
        model: its variables are where the strategy keeps them; compiled and built.
        strategy: of tf.distribute.
        examples: in the largest global batch.
        parameter_device: that holds all variables; replicas only read them. None: every replica has its own
            copy of all variables of model and optimizer, and applies what all found to it.
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
        self._rows = -(-examples // self._replicas)
        self._device = parameter_device
        self._on_replicas = parameter_device is None
        # Keras's own step has each replica's part in the loss; a user's may not.
        self._together = SUM if trains_by_keras(model) else MEAN
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._placements: dict[int, Placement] = {}
        complaint = needs_whole_batch(model)
        if complaint is not None and self._replicas > 1:
            raise UsageError(complaint)
        if getattr(model, "optimizer", None) is not None and model.optimizer.built:
            replica_scope.count_each_example_once(model)
            if self._on_replicas:
                replica_scope.update_on_each_replica(model.optimizer)

    # What the Trainer calls.

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, which hold equally many examples, in one call of TensorFlow."""
        return self._run("train_step", shares)

    def test(self, share: Share) -> Logs:
        """Update the metrics from `share`."""
        return self._run("test_step", [share])

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share`, in their order."""
        placement = self._placement(share.examples)
        data = self._divided([share], placement)
        outputs = self._program("predict_step", 1, placement.is_full)(data)
        found = [
            self._strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(outputs)
        ]
        joined = [
            tf.concat([part[:real] for part, real in zip(parts, placement.real, strict=True)], 0)
            for parts in found
        ]
        return tf.nest.pack_sequence_as(outputs, joined)

    def finish(self) -> None:
        """Nothing is in flight: each step returns when it is done."""

    # From shares to what the programs take.

    def _placement(self, examples: int) -> Placement:
        if examples not in self._placements:
            self._placements[examples] = place(examples, self._replicas, self._rows)
        return self._placements[examples]

    def _divided(self, shares: Sequence[Share], placement: Placement) -> Any:
        """Return each replica's rows; of several shares (steps, rows, ...)."""
        axis = 0 if len(shares) == 1 else 1

        def rows_of(*leaves: tf.Tensor) -> list[tf.Tensor]:
            leaf = leaves[0] if len(leaves) == 1 else tf.stack(leaves)
            if not placement.is_full:
                leaf = tf.gather(leaf, placement.rows.reshape(-1), axis=axis)
            return tf.split(leaf, self._replicas, axis)

        data = [share.data for share in shares]
        with tf.device("CPU:0"):  # From there each device gets its own part.
            flat = [rows_of(*leaves) for leaves in zip(*map(tf.nest.flatten, data), strict=True)]
        mask = [] if placement.is_full else [tf.constant(placement.mask)]
        weights = tf.constant(placement.weights)

        def of_replica(context: tf.distribute.experimental.ValueContext) -> Any:
            replica = context.replica_id_in_sync_group
            rows = tf.nest.pack_sequence_as(data[0], [leaf[replica] for leaf in flat])
            return rows, [m[replica] for m in mask], weights[replica]

        return self._strategy.experimental_distribute_values_from_function(of_replica)

    def _run(self, step: str, shares: Sequence[Share]) -> Logs:
        examples = shares[0].examples
        placement = self._placement(examples)
        own = overridden(self._model, step, "compute_loss", "compute_metrics")
        if own is not None and not placement.is_full:
            raise UsageError(
                f"The model has a {own} of its own, and this batch has {examples} examples for "
                f"{self._replicas} replicas with {self._rows} rows each: what is filled up with repeated examples, "
                f"such a step would count. {EVEN}"
            )
        program = self._program(step, len(shares), placement.is_full)
        return program(self._divided(shares, placement), tf.constant(float(examples)))

    # The programs. They are traced once for full batches and once for others.

    def _program(self, step: str, count: int, is_full: bool) -> Callable[..., Any]:
        key = (step, count, is_full)
        if key not in self._compiled:
            # An object of its own, for TensorFlow counts traces by function and warns of many.
            if step == "predict_step":
                program = functools.partial(self._predictions)
            else:
                program = functools.partial(self._steps, step, count)
            if not self._model.run_eagerly:
                program = tf.function(program, autograph=False)
            self._compiled[key] = program
        return self._compiled[key]

    def _predictions(self, divided: Any) -> Any:
        def predict(rows: Any, mask: list[tf.Tensor], weight: tf.Tensor) -> Any:
            with ReplicaScope([], None, self._rows, self._replicas, tf.constant(1.0)):
                return self._model.predict_step(rows)

        return self._strategy.run(predict, args=divided, options=STATIC_SHAPES)

    def _steps(self, step: str, count: int, divided: Any, examples: tf.Tensor) -> Logs:
        """`count` steps, one after the other."""
        if count == 1:
            return self._step(step, divided, examples, None)
        if tf.executing_eagerly():
            return [self._step(step, divided, examples, number) for number in range(count)][-1]

        def body(number: Any, _: Any) -> Any:
            return number + 1, self._step(step, divided, examples, number)

        logs = self._step(step, divided, examples, 0)
        _, logs = tf.while_loop(
            lambda number, _: number < count, body, (tf.constant(1), logs), parallel_iterations=1
        )
        return logs

    def _step(self, step: str, divided: Any, examples: tf.Tensor, number: Any) -> Logs:
        """One step, seen from outside the replicas; `number` of the share if there are several."""
        found = Found()
        states = [tf_variable(v).read_value() for v in self._metric_variables()]

        def replica(rows: Any, mask: list[tf.Tensor], weight: tf.Tensor, *shared: Any) -> Any:
            if number is not None:
                rows = tf.nest.map_structure(lambda leaf: leaf[shared[-1]], rows)
            return self.on_replica(step, rows, mask, weight, shared[0], shared[1], found)

        shared = (examples, states) if number is None else (examples, states, number)
        with replica_scope.pure_steps(self._model):
            parts = self._strategy.run(replica, (*divided, *shared), options=STATIC_SHAPES)
        if not self._on_replicas:
            with tf.device(self._device):
                gradients = self._reduced(self._together, parts["gradients"])
                self._apply(gradients, self._reduced(SUM, parts["states"]), found)
        self._add_to_metrics(self._reduced(SUM, parts["metrics"]), found, examples)
        results = self._model.get_metrics_result()
        logs = parts["logs"]
        if set(logs) == set(results):
            return results
        return {name: self._strategy.reduce(MEAN, value, axis=None) for name, value in logs.items()}

    def on_replica(
        self,
        step: str,
        rows: Any,
        mask: list[tf.Tensor],
        weight: tf.Tensor,
        examples: tf.Tensor,
        states: list[tf.Tensor],
        found: Found,
    ) -> dict[str, Any]:
        """Run the model's `step` on one replica's rows, inside `pure_steps`.

        Where replicas have their own copies of the variables, what all of them found is applied to this one's.
        Else nothing changes.

        Args:
            rows: (x, y, sample_weight), with the replica's rows in the leading dimension.
            mask: [1 for each row that counts, else 0], or [] where all do.
            weight: this replica's part of averages over replicas.
            examples: that count, of all replicas.
            states: of all metrics.
            found: filled with the variables that the step changes.

        Returns:
            gradients: of each of found.trained. (Unless applied.)
            states: whose sum over the replicas is the new value of each of found.states. (Unless applied.)
            metrics: whose sum is the growth, or the new value, of each of found.metrics.
            logs: what the step returned.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        mapping = [(v, _own_seed(v, replica)) for v in seed_variables(self._model)]
        metrics = self._metric_variables()
        mapping += [
            (v, tf.zeros_like(state) if _adds_up(v) else state)
            for v, state in zip(metrics, states, strict=True)
        ]
        scope = ReplicaScope(
            mapping, mask[0] if mask else None, self._rows, self._replicas, examples
        )
        with scope:
            logs = getattr(self._model, step)(rows)
        if step == "train_step":
            require_gradients(self._model, scope.handed_out)
        if mask and scope.losses:
            raise UsageError(
                "The model adds losses of its own (add_loss, activity regularizers), and this batch is filled up "
                f"with repeated examples, which they would count. {EVEN}"
            )
        scope.require_known([*self._model.variables, *metrics])
        counted = {id(v) for v in metrics}
        others = [v for v in unique(self._model.variables) if id(v) not in counted]
        found.trained = [v for _, v in scope.handed_out]
        found.states = [v for v in others if scope.update_of(v) is not None]
        found.metrics = [v for v in metrics if scope.update_of(v) is not None]
        if mask:
            self._require_counted(found.metrics)
        is_first = tf.equal(replica, 0)
        gradients = [gradient for gradient, _ in scope.handed_out]
        new = [_part(v, scope.update_of(v), weight, is_first) for v in found.states]
        if self._on_replicas:
            self._apply_everywhere(gradients, new, found)
        return {
            **({} if self._on_replicas else {"gradients": gradients, "states": new}),
            "metrics": [
                _metric_part(v, scope.update_of(v), self._replicas, is_first) for v in found.metrics
            ],
            "logs": {name: tf.convert_to_tensor(value) for name, value in logs.items()},
        }

    def _require_counted(self, updated: list[Any]) -> None:
        counted = {id(v) for v in replica_scope.counted_by_rows(self._model)}
        for variable in updated:
            if id(variable) not in counted:
                raise UsageError(
                    f"A layer updates the metric state {variable.path!r}, and this batch is filled up with repeated "
                    f"examples, which it would count. {EVEN}"
                )

    # What is done with what the replicas found.

    def _apply_everywhere(self, gradients: list[Any], states: list[Any], found: Found) -> None:
        """On a replica: apply what all replicas found to this one's variables."""
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(self._together, gradients) if gradients else []
        states = context.all_reduce(SUM, states) if states else []
        self._apply(gradients, states, found)

    def _apply(self, gradients: list[Any], states: list[Any], found: Found) -> None:
        for variable, value in zip(found.states, states, strict=True):
            variable.assign(value)
        if gradients:
            pairs = list(zip(gradients, found.trained, strict=True))
            self._model.optimizer.apply_gradients(pairs)

    def _reduced(self, operation: Any, values: list[Any]) -> list[Any]:
        return [self._strategy.reduce(operation, value, axis=None) for value in values]

    def _add_to_metrics(self, values: list[Any], found: Found, examples: tf.Tensor) -> None:
        trackers = replica_scope.loss_trackers(self._model)
        by_rows = {id(v) for tracker in trackers for v in tracker.variables}
        for variable, value in zip(found.metrics, values, strict=True):
            if id(variable) in by_rows:
                # Keras weighs a replica's loss by its rows, fillers included.
                value = value * tf.cast(examples / (self._replicas * self._rows), value.dtype)
            variable.assign(variable + value if _adds_up(variable) else value)

    def _metric_variables(self) -> list[Any]:
        return unique(v for metric in self._model.metrics for v in metric.variables)


def _adds_up(variable: Any) -> bool:
    return (variable.aggregation or "sum") == "sum"


def _metric_part(variable: Any, value: tf.Tensor, replicas: int, is_first: tf.Tensor) -> tf.Tensor:
    if _adds_up(variable):
        return value
    if variable.aggregation == "mean":
        return value / tf.cast(replicas, value.dtype)
    return tf.where(is_first, value, tf.zeros_like(value))


def _part(variable: Any, value: tf.Tensor, weight: tf.Tensor, is_first: tf.Tensor) -> tf.Tensor:
    """This replica's part of the new value: an average for numbers (moving statistics), else the first one's."""
    value = tf.cast(value, tf_variable(variable).dtype)
    if value.dtype.is_floating:
        return value * tf.cast(weight, value.dtype)
    if value.dtype == tf.bool:
        raise UsageError(
            f"The step changes the variable {variable.path!r} of type bool, which several replicas cannot add "
            "up: keep it as an integer, or use strategy='horovod'"
        )
    return tf.where(is_first, value, tf.zeros_like(value))


def _own_seed(variable: Any, replica: Any) -> tf.Tensor:
    """Return other random numbers for each replica; the first one keeps the seed."""
    seed = tf_variable(variable).read_value()
    offset = tf.cast(replica, tf.uint32) * tf.constant(SEED_STRIDE, tf.uint32)
    offset = tf.bitwise.bitwise_and(offset, tf.constant(0x7FFFFFFF, tf.uint32))
    return tf.bitwise.bitwise_xor(seed, tf.cast(offset, seed.dtype))


def require_plain(optimizer: Any, strategy: str) -> None:
    """Raise UsageError for an optimizer that Horovod reduces."""
    if is_distributed(optimizer):
        raise UsageError(
            f"strategy {strategy}: the optimizer is distributed by Horovod, and the replicas of one process are not "
            "its ranks: give the Trainer the plain optimizer, without DistributedOptimizer"
        )


def _require_own_collectives(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "hvdtrain_synchronized", False):
            raise UsageError(
                f"Layer {layer.name!r} ({type(layer).__name__}) communicates through Horovod, and the replicas of one "
                "process are not its ranks: use keras.layers.BatchNormalization(synchronized=True)"
            )


@contextlib.contextmanager
def local_variables(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Make variables that every replica of `strategy` has its own copy of, and updates by itself.

    Those of metrics stay on the host: replicas tell by how much they grow.
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


def build(model: keras.Model, data: Any) -> int:
    """Create all variables of a compiled model for symbolic `data`; return the examples of a global batch."""
    symbolic_build(model, data)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return int(tf.nest.flatten(data)[0].shape[0])
