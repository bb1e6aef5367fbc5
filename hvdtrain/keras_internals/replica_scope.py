"""What the strategies with several replicas in one process need of Keras's inside. Tested with Keras 3.15.

A replica runs a model's own `train_step` or `test_step` inside a `ReplicaScope`, where nothing happens to any
variable: what the step assigns (moving statistics, seeds, states of metrics) is kept in the scope, and the
gradients that it would apply are handed out. So the step is a pure function of its data, in whichever context
of tf.distribute it is traced; what it found is summed over the replicas and assigned once.

In the scope the replica's loss is that of a process alone. (Keras divides losses by the number of replicas, but
not those of a user's own.) Filler rows, which bring all replicas to one static shape, do not count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.losses import compiled_losses, loss_weights, mask_in_loss
from hvdtrain.keras_internals.models import trains_by_keras
from hvdtrain.keras_internals.optimizers import AppliesByKeras, gradients_taken, inner_of
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import tf_variable

EVEN = (
    "Give global_batch_size a multiple of the number of replicas, and data whose length is a multiple of "
    "global_batch_size (or steps_per_epoch, validation_steps, steps), so that no batch must be filled up"
)

ONE_UPDATE = (
    "The gradients of several replicas in one process are added up and applied when the step is over, so it would see "
    "the values from before the update. Do that in a callback (on_train_batch_end), or use strategy='horovod'"
)


class ReplicaScope(keras.StatelessScope):
    """Keeps what a step assigns, instead of assigning it.

    Attributes:
        rows: 1 for each real row and 0 for each filler, float32 of shape (rows,); None: all are real.
        size: rows of this replica, fillers included.
        replicas: how many there are.
        examples: real rows of all replicas, a float32 scalar.
    """

    def __init__(
        self,
        mapping: list[tuple[Any, Any]],
        rows: tf.Tensor | None,
        size: int,
        replicas: int,
        examples: tf.Tensor,
    ) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self.rows = rows
        self.size = size
        self.replicas = replicas
        self.examples = examples
        self.handed_out: list[tuple[Any, Any]] = []
        self.loss_is_scalar = False
        self.loss_mask: Any = None
        self._given = dict(self.state_mapping)
        self._assigned: list[Any] = []
        self._stale: set[int] = set()

    def hand_out(self, pairs: list[tuple[Any, Any]], optimizer: Any) -> None:
        """Take the (gradient, variable) pairs that the step tells `optimizer` to apply: it can do so once.

        The update is made after the step, so nothing in it may use what the update changes any more.
        """
        if self._stale:
            raise UsageError(f"The train_step applies gradients twice. {ONE_UPDATE}")
        inner = inner_of(optimizer)
        changed = [*(v for _, v in pairs), *optimizer.variables, *inner.variables]
        rate = getattr(inner, "_learning_rate", None)
        self._stale = {id(_held(v)) for v in changed if v is not rate}
        self.handed_out += [(g, v) for g, v in pairs if g is not None]

    def add_update(self, update: tuple[Any, Any]) -> None:
        self._require_current(update[0])
        self._assigned.append(update[0])
        super().add_update(update)

    def require_known(self, variables: list[Any]) -> None:
        """Raise UsageError if the step assigns any other variable: that would be forgotten."""
        known = {id(v) for v in variables}
        for variable in self._assigned:
            if id(variable) not in known:
                raise UsageError(
                    f"The step changes the variable {variable.path!r}, which belongs neither to the model nor to a "
                    "metric of it (a second optimizer's, the optimizer's own, or that of a random generator that the "
                    "model does not hold), so what several replicas make of it would be lost. Make it an attribute "
                    "of the model, or use strategy='horovod'"
                )

    def _require_current(self, variable: Any) -> None:
        if id(_held(variable)) in self._stale:
            raise UsageError(
                f"The train_step uses {variable.path!r} after it has applied gradients. {ONE_UPDATE}"
            )

    def get_current_value(self, variable: Any) -> Any:
        self._require_current(variable)
        # Keras expects a value for each variable with a regularizer. The variable itself is watched by tapes.
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def update_of(self, variable: Any) -> tf.Tensor | None:
        """Return the value that the step gave to `variable`; None if it did not."""
        value = self.state_mapping.get(id(variable))
        return None if value is self._given.get(id(variable)) else value

    def real(self, values: tf.Tensor) -> tf.Tensor:
        """Return `values`, of shape (rows, ...), with 0 in the filler rows."""
        if self.rows is None:
            return values
        keep = tf.reshape(self.rows, [-1] + [1] * (values.shape.rank - 1))
        return tf.where(keep > 0, values, tf.zeros_like(values))


def _held(variable: Any) -> Any:
    """Return the tf.Variable inside a Keras variable, past its scopes; other variables as they are."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def current_replica() -> ReplicaScope | None:
    """Return the scope of the replica whose step is being run here."""
    scope = backend.get_stateless_scope()
    return scope if isinstance(scope, ReplicaScope) else None


@contextlib.contextmanager
def pure_steps(model: keras.Model) -> Iterator[None]:
    """Let steps hand their gradients to their ReplicaScope, and keep the replicas' added losses apart.

    Outside of a ReplicaScope the optimizer applies gradients as ever.

    The replicas are traced in turns, in a thread each, and share the layers. The gradients of Keras's own
    train_step are those of the loss divided by the number of replicas.
    """
    _correct_scaling()
    optimizer = model.optimizer
    model._clear_losses()
    # Added losses are told apart by their identity, which must not be given to another one meanwhile.
    alive: list[ReplicaScope] = []

    def take(pairs: list[tuple[Any, Any]]) -> bool:
        scope = current_replica()
        if scope is None:
            return False
        scope.hand_out(pairs, optimizer)
        return True

    def clear_losses() -> None:
        scope = current_replica()
        if scope is not None:
            alive.append(scope)
            scope.losses = []

    def scale_loss(loss: tf.Tensor) -> tf.Tensor:
        # Before the backward pass: with loss scaling, what overflows is what overflows in one process.
        scaled = type(optimizer).scale_loss(optimizer, loss)
        scope = current_replica()
        assert scope is not None
        return scaled / tf.cast(scope.replicas, scaled.dtype)

    if trains_by_keras(model):
        object.__setattr__(optimizer, "scale_loss", scale_loss)
    object.__setattr__(model, "_clear_losses", clear_losses)
    try:
        with gradients_taken(optimizer, take):
            yield
    finally:
        vars(optimizer).pop("scale_loss", None)
        object.__delattr__(model, "_clear_losses")


_CORRECTING = threading.Lock()


def _correct_scaling() -> None:
    """Keep Keras from scaling losses by the number of replicas inside a ReplicaScope."""
    with _CORRECTING:
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            original = getattr(keras_loss, name)
            if getattr(original, "hvdtrain_corrected", False):
                continue

            def corrected(value: Any, original: Any = original) -> Any:
                return original(value) if current_replica() is None else value

            corrected.hvdtrain_corrected = True  # type: ignore[attr-defined]
            setattr(keras_loss, name, corrected)


def read_mirrored_scalars() -> None:
    """Let float() and int() read Keras variables that each replica has a copy of, as callbacks do."""
    for kind in (float, int):
        name = f"__{kind.__name__}__"
        original = getattr(keras.Variable, name)
        if getattr(original, "hvdtrain_corrected", False):
            continue

        def read(self: Any, kind: Any = kind, original: Any = original) -> Any:
            mirrored = isinstance(self.value, tf.distribute.DistributedValues)
            return kind(self.numpy()) if mirrored and self.ndim == 0 else original(self)

        read.hvdtrain_corrected = True  # type: ignore[attr-defined]
        setattr(keras.Variable, name, read)


def loss_trackers(model: keras.Model) -> list[Any]:
    """Return the metrics that Keras weighs by a batch's rows: of the whole loss and of each output's."""
    compiled = getattr(model, "_compile_loss", None)
    return [model._loss_tracker, *(compiled.metrics if compiled else [])]


def counted_by_rows(model: keras.Model) -> list[Any]:
    """Return the states of metrics that a fit or evaluation of Keras updates: fillers do not count in them."""
    compiled = getattr(model, "_compile_metrics", None)
    metrics = [*loss_trackers(model), *([compiled] if compiled else [])]
    return [v for metric in metrics for v in metric.variables]


class _WholeLoss:
    """Lays over a loss what makes the mean over the replicas the loss of the whole batch.

    With S_r the sum over replica r's real rows, B its rows, n the real rows of all R replicas:

    - a mean over rows: R B / n times S_r / B;
    - a sum: R times S_r;
    - a mean over unmasked entries, or over sample weights, whose sum is D_r on the replica's real rows and
      D'_r with the fillers: R D'_r / sum(D_r) times S_r / D'_r.
    """

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = super().call(y_true, y_pred)  # type: ignore[misc]
        scope = current_replica()
        if scope is None:
            return values
        scope.loss_is_scalar = values.shape.rank == 0
        scope.loss_mask = mask = get_keras_mask(values)
        if scope.rows is None:
            return values
        if scope.loss_is_scalar:
            raise UsageError(
                f"The loss {self.name!r} returns one number for a batch, and this batch is filled up with "  # type: ignore[attr-defined]
                f"repeated examples, which it would count: return one number for each example. Or: {EVEN}"
            )
        real = scope.real(values)
        if mask is not None:
            set_keras_mask(real, mask)
        return real

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = super().__call__(y_true, y_pred, sample_weight)  # type: ignore[misc]
        scope = current_replica()
        if scope is None or scope.loss_is_scalar:
            return loss
        if self.reduction in (None, "none"):  # type: ignore[attr-defined]
            raise UsageError(
                f"The loss {self.name!r} has reduction={self.reduction!r}: what several replicas found is put "  # type: ignore[attr-defined]
                "together as a sum or a mean only. Use another reduction, or strategy='horovod'"
            )
        if self.reduction == "sum":  # type: ignore[attr-defined]
            return loss * tf.cast(scope.replicas, loss.dtype)
        mask = mask_in_loss(y_pred, scope.loss_mask)
        weights = loss_weights(self, mask, sample_weight)
        if weights is not None:
            own = tf.stop_gradient(tf.cast(weights, tf.float32))
            total = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.reduce_sum(scope.real(own))
            )
            factor = scope.replicas * tf.math.divide_no_nan(tf.reduce_sum(own), total)
        elif scope.rows is not None:
            factor = float(scope.replicas * scope.size) / scope.examples
        else:
            return loss
        return loss * tf.cast(factor, loss.dtype)


class _MetricsOfRealRows:
    """Lays the weight 0 of filler rows over the metrics of a compiled model."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        scope = current_replica()
        if scope is None or scope.rows is None:
            super().update_state(y_true, y_pred, sample_weight)  # type: ignore[misc]
            return
        labels, outputs = self._flatten_y(y_true), self._flatten_y(y_pred)  # type: ignore[attr-defined]
        weights = [None] if sample_weight is None else self._flatten_y(sample_weight)  # type: ignore[attr-defined]
        if len(weights) < len(labels):
            weights = [weights[0]] * len(labels)
        for listed, weighted in ((self._flat_metrics, False), (self._flat_weighted_metrics, True)):  # type: ignore[attr-defined]
            for found, label, output, weight in zip(listed, labels, outputs, weights, strict=False):
                for metric in _metrics_in(found):
                    _update(metric, label, output, weight if weighted else None, scope)


def _metrics_in(found: Any) -> list[Any]:
    if isinstance(found, MetricsList):
        return found.metrics
    return [] if found is None else [found]


def _update(metric: Any, y_true: Any, y_pred: Any, weight: Any, scope: ReplicaScope) -> None:
    """Update `metric` from the real rows."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        values = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        if len(values.shape) == 0:
            raise UsageError(
                f"The metric {metric.name!r} returns one number for a batch, and this batch is filled up with "
                f"repeated examples, which it would count: return one number for each example. Or: {EVEN}"
            )
    assert scope.rows is not None
    rows = scope.rows
    if weight is not None:
        weight = tf.convert_to_tensor(weight)
        rows = scope.real(tf.cast(weight, tf.float32))
    elif get_keras_mask(y_pred) is not None:
        mask = get_keras_mask(y_pred)
        rows = tf.reshape(rows, [-1] + [1] * (mask.shape.rank - 1))
    rows = tf.identity(rows)
    metric.update_state(y_true, y_pred, sample_weight=rows)
    updates = [value for v in metric.variables if (value := scope.update_of(v)) is not None]
    if updates and not tf.executing_eagerly() and not any(_depends(v, rows) for v in updates):
        raise UsageError(
            f"The metric {metric.name!r} does not regard sample_weight, so it would count the repeated examples with "
            f"which this batch is filled up. {EVEN}"
        )


def _depends(tensor: tf.Tensor, on: tf.Tensor) -> bool:
    """Whether `on` is needed to compute `tensor`, in a graph."""
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation is on.op:
            return True
        if operation not in seen:
            seen.add(operation)
            waiting += [one.op for one in operation.inputs]
    return False


class _OnEachReplica(AppliesByKeras):
    """Lays over an optimizer: each replica updates its own copy, from gradients that are equal on all.

    Keras sums gradients after it has clipped them, and updates variables in calls between the replicas, which
    cannot stand inside a condition (gradient accumulation, loss scaling).
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return list(grads_and_vars)

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, tf_variable(variable), learning_rate)  # type: ignore[attr-defined]

    def _apply_weight_decay(self, variables: Any) -> None:
        own = super()._apply_weight_decay  # type: ignore[misc]
        if own.__func__ is keras.optimizers.Optimizer._apply_weight_decay:
            BaseOptimizer._apply_weight_decay(self, variables)
        else:
            own(variables)  # Muon's.

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        BaseOptimizer._backend_increment_gradient_accumulators(self, grads, acc_grads)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        BaseOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)


class _ScaleOnEachReplica:
    """The same for a LossScaleOptimizer."""

    def _tf_apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self._common_apply(grads, trainable_variables)  # type: ignore[attr-defined]


def made_again(optimizer: Any) -> Any:
    """Return an unbuilt optimizer like `optimizer`, with variables of its own, which are made here.

    Raises:
        UsageError: it names variables that do not decay, which the new one does not know.
    """
    again = type(optimizer).from_config(optimizer.get_config())
    before, after = inner_of(optimizer), inner_of(again)
    if getattr(before, "_exclude_from_weight_decay", None):
        raise UsageError(
            "exclude_from_weight_decay(var_list=...): the optimizer is made anew where the replicas are, and does not "
            "know these variables there: give names, exclude_from_weight_decay(var_names=[...])"
        )
    # It is in no configuration.
    pattern = getattr(before, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None:
        after.exclude_from_weight_decay(var_names=[pattern.pattern])
    return again


def update_on_each_replica(optimizer: Any) -> None:
    """Let `optimizer`, or the one inside a LossScaleOptimizer as well, update each replica's copy."""
    inner = getattr(optimizer, "inner_optimizer", None)
    overlay(optimizer, _OnEachReplica if inner is None else _ScaleOnEachReplica)
    if inner is not None:
        overlay(inner, _OnEachReplica)


def count_each_example_once(model: keras.Model) -> None:
    """Make the losses and metrics of a built, compiled model exact over replicas; elsewhere they stay as they are."""
    for loss in compiled_losses(model):
        overlay(loss, _WholeLoss)
    metrics = getattr(model, "_compile_metrics", None)
    if isinstance(metrics, CompileMetrics):
        overlay(metrics, _MetricsOfRealRows)
