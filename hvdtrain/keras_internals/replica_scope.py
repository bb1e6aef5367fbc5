"""Steps of several replicas in one process, for the strategies on tf.distribute. Tested with Keras 3.15.

A replica runs a model's own `train_step` or `test_step` inside a `ReplicaScope`, where no variable changes: the scope
collects the values that the step assigns (moving statistics, seeds, metric states) and the gradients that it would
apply. So the step is a pure function of its data, in any context of tf.distribute; its results are summed over the
replicas and assigned once.

In the scope, a replica's loss is that of a single process. (Keras would divide its own losses by the number of
replicas, but not the user's.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.models import trains_by_keras
from hvdtrain.keras_internals.optimizers import AppliesByKeras, gradients_taken, inner_of
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import identities, identity, tf_variable

ONE_UPDATE = (
    "The gradients of several replicas in one process are added up and applied after the step, so the step "
    "would see the values from before the update. Do this in a callback (on_train_batch_end), or use "
    "strategy='horovod'"
)


class ReplicaScope(keras.StatelessScope):
    """Scope that collects the values that a step assigns, instead of assigning them.

    Args:
        mapping: Initial (variable, value) pairs, as in keras.StatelessScope.
        replicas: Number of replicas over which the batch is divided.

    Attributes:
        replicas: Number of replicas over which the batch is divided.
        handed_out: (gradient, variable) pairs that the step would apply.
    """

    def __init__(self, mapping: list[tuple[Any, Any]], replicas: int) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self.replicas = replicas
        self.handed_out: list[tuple[Any, Any]] = []
        self._given = dict(self.state_mapping)
        self._assigned: list[Any] = []
        self._stale: set[int] = set()

    def hand_out(self, pairs: list[tuple[Any, Any]], optimizer: Any) -> None:
        """Collect the (gradient, variable) pairs that the step passes to `optimizer`, which it may do once.

        The update is applied after the step, so that the rest of the step must not use the variables that it changes.

        Raises:
            UsageError: The step applies gradients a second time.
        """
        if self._stale:
            raise UsageError(f"The train_step applies gradients twice. {ONE_UPDATE}")
        inner = inner_of(optimizer)
        changed = [*(v for _, v in pairs), *optimizer.variables, *inner.variables]
        rate = getattr(inner, "_learning_rate", None)
        self._stale = identities(v for v in changed if v is not rate)
        self.handed_out += [(g, v) for g, v in pairs if g is not None]

    def add_update(self, update: tuple[Any, Any]) -> None:
        self._require_current(update[0])
        self._assigned.append(update[0])
        super().add_update(update)

    def require_known(self, variables: list[Any]) -> None:
        """Raise UsageError if the step assigned a variable not in `variables`, whose new value would be lost."""
        known = {id(v) for v in variables}
        for variable in self._assigned:
            if id(variable) not in known:
                raise UsageError(
                    f"The step changes the variable {variable.path!r}, which belongs neither to the model nor "
                    "to a metric of it (a second optimizer's, the optimizer's own, or that of a random "
                    "generator that the model does not hold), so the changes made by several replicas would "
                    "be lost. Make it an attribute of the model, or use strategy='horovod'"
                )

    def _require_current(self, variable: Any) -> None:
        if identity(variable) in self._stale:
            raise UsageError(
                f"The train_step uses {variable.path!r} after it has applied gradients. {ONE_UPDATE}"
            )

    def get_current_value(self, variable: Any) -> Any:
        self._require_current(variable)
        # Keras expects a value for each variable with a regularizer. Tapes watch the variable itself.
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def update_of(self, variable: Any) -> tf.Tensor | None:
        """Return the value that the step assigned to `variable`; None if it assigned none."""
        value = self.state_mapping.get(id(variable))
        return None if value is self._given.get(id(variable)) else value


def current_replica() -> ReplicaScope | None:
    """Return the scope of the replica whose step is being run in this thread; None outside of one."""
    scope = backend.get_stateless_scope()
    return scope if isinstance(scope, ReplicaScope) else None


@contextlib.contextmanager
def pure_steps(model: keras.Model) -> Iterator[None]:
    """Let steps pass their gradients to their ReplicaScope, and keep the replicas' added losses apart.

    Outside of a ReplicaScope the optimizer applies gradients as usual.

    The replicas are traced in turns, each in its own thread, and share the layers. In Keras's own train_step the loss
    is divided by the number of replicas before the gradients are computed.
    """
    _correct_scaling()
    optimizer = model.optimizer
    model._clear_losses()
    # Added losses are identified by id(), so the scopes must stay alive.
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
        # Before the backward pass, so that with loss scaling the same steps overflow as in one process.
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
            correct(keras_loss, name, _scaled)


def _scaled(original: Callable[[Any], Any], value: Any) -> Any:
    return original(value) if current_replica() is None else value


def read_mirrored_scalars() -> None:
    """Let float() and int(), which callbacks use, read Keras variables that are mirrored over the replicas."""
    for kind in (float, int):
        correct(keras.Variable, f"__{kind.__name__}__", functools.partial(_read_as, kind))


def _read_as(kind: Callable[[Any], Any], original: Callable[[Any], Any], self: Any) -> Any:
    mirrored = isinstance(self.value, tf.distribute.DistributedValues)
    return kind(self.numpy()) if mirrored and self.ndim == 0 else original(self)


class _OnEachReplica(AppliesByKeras):
    """Optimizer mixin: each replica updates its own copy of the variables, with gradients that are equal on all.

    Keras would sum gradients after it has clipped them, and update variables in cross-replica context, which is not
    possible inside a condition (gradient accumulation, loss scaling).
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
            own(variables)  # Muon overrides it.

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        BaseOptimizer._backend_increment_gradient_accumulators(self, grads, acc_grads)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        BaseOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)


class _ScaleOnEachReplica:
    """As _OnEachReplica, for a LossScaleOptimizer."""

    def _tf_apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self._common_apply(grads, trainable_variables)  # type: ignore[attr-defined]


def made_again(optimizer: Any) -> Any:
    """Return an unbuilt copy of `optimizer`, whose variables are created in the current scope.

    Raises:
        UsageError: `optimizer` excludes variables from weight decay by object, which the copy cannot.
    """
    again = type(optimizer).from_config(optimizer.get_config())
    before, after = inner_of(optimizer), inner_of(again)
    if getattr(before, "_exclude_from_weight_decay", None):
        raise UsageError(
            "exclude_from_weight_decay(var_list=...): the optimizer is recreated for the "
            "replicas and does not know these variables there: pass names, "
            "exclude_from_weight_decay(var_names=[...])"
        )
    # Not part of the configuration.
    pattern = getattr(before, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None:
        after.exclude_from_weight_decay(var_names=[pattern.pattern])
    return again


def update_on_each_replica(optimizer: Any) -> None:
    """Let `optimizer`, and the one inside a LossScaleOptimizer, update each replica's copy of the variables."""
    inner = getattr(optimizer, "inner_optimizer", None)
    overlay(optimizer, _OnEachReplica if inner is None else _ScaleOnEachReplica)
    if inner is not None:
        overlay(inner, _OnEachReplica)
