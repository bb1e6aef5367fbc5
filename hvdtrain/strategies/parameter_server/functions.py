"""Steps as functions that a worker runs: all changes other than those of the weights are returned as values.

Weights and optimizer state are updated on the servers by operations that lose no other worker's update (assign_add,
assign_sub). Keras's own `Variable.assign_add` reads, adds and assigns, so of two concurrent updates one would be lost.
All other assignments of a step are therefore intercepted while it is traced:

- metrics start from zero, and their states after the step are returned, to be summed by the chief;
- the number of the step and the learning rate are arguments of the step;
- statistics (BatchNormalization) and seeds are changed on the servers by the difference that the step made.

A worker may die at any moment, and its step is then given to another one. So a step changes nothing on the servers
before everything needed for the change has arrived; and together with the change a server records the number of the
step, so that the chief can tell whether it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.metric_trials import WHOLE_PARTS
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.keras_internals.metric_calls import metrics_of, watched
from hvdtrain.keras_internals.models import own_non_trainable_variables
from hvdtrain.keras_internals.remote_variables import (
    arrival,
    in_step,
    make_step_variable,
    step_constants,
    tf_variables,
)
from hvdtrain.keras_internals.variables import seed_variables, unique
from hvdtrain.strategies.step_metrics import SummedMetrics


@dataclass(frozen=True)
class Ticket:
    """Identifies a step.

    Attributes:
        slot: Index of the step among those in flight, at which a server records its number.
        number: Number of the step, from 1; higher than that of every earlier step.
    """

    slot: int
    number: int


@dataclass(frozen=True)
class Traced:
    """A step traced for data of one signature.

    Attributes:
        function: Concrete function of (constants, ticket, data).
        signature: A tf.TensorSpec for each tensor of the data.
        log_names: Names of the logs, which follow the metrics' states in the function's result.
    """

    function: Any
    signature: list[tf.TensorSpec]
    log_names: list[str]


class StepFunctions:
    """Traces the steps of a built and compiled model whose variables are on the servers.

    Args:
        model: Built and compiled model.
        limit: Largest number of steps in flight.

    Attributes:
        metrics: Variables of the metrics' states, on this process.
        constants: Variables of the optimizer whose values are arguments of each step.
    """

    def __init__(self, model: keras.Model, limit: int) -> None:
        self._model = model
        self._applied = _beside_weights(model, tf.zeros([limit], tf.int64))
        model.reset_metrics()
        self.metrics = [make_step_variable(v) for v in state_variables(model.metrics)]
        self._zero = [v.value.numpy() for v in self.metrics]
        self.constants = [make_step_variable(v) for v in step_constants(model.optimizer)]
        statistics = [*own_non_trainable_variables(model), *seed_variables(model)]
        counted = {id(v) for v in self.metrics}
        self._statistics = [
            make_step_variable(v) for v in unique(statistics) if id(v) not in counted
        ]
        self._steps: dict[str, Callable[[Any], Any]] = {
            "train": model.train_step,
            "test": model.test_step,
            "predict": model.predict_step,
        }
        self._traced: dict[tuple[str, int], Traced] = {}
        self._summed = SummedMetrics(WHOLE_PARTS)

    def values(self) -> list[tf.Tensor]:
        """Return the present values of the constants."""
        return [v.value.read_value() for v in self.constants]

    def arguments(self, ticket: Ticket, data: Any) -> tuple[Any, ...]:
        """Return the arguments for a call of a step."""
        return self.values(), tf.constant([ticket.slot, ticket.number], tf.int64), data

    def was_applied(self, ticket: Ticket) -> bool:
        """Ask a server whether the update of the training step with this ticket was made."""
        return int(self._applied.numpy()[ticket.slot]) == ticket.number

    def traced(self, kind: str, data: Any) -> Traced:
        """Return the step `kind` traced for data like `data`.

        "train" and "test" return one float64 vector: the metrics' states, counted from zero, and the logs of the step.
        "predict" returns the model's outputs.
        """
        signature = [tf.TensorSpec.from_tensor(leaf) for leaf in tf.nest.flatten(data)]
        # One function for each number of examples: Keras weights the losses of several outputs by that number only if
        # it is known while tracing. Other dimensions may vary within one function.
        key = (kind, int(signature[0].shape[0]))
        known = self._traced.get(key)
        if known is not None:
            if all(map(_takes, known.signature, signature)):
                return known
            pairs = zip(known.signature, signature, strict=True)
            signature = [old.most_specific_common_supertype([new]) for old, new in pairs]
        self._traced[key] = self._trace(kind, signature, data)
        return self._traced[key]

    def unpack(
        self, vector: np.ndarray, traced: Traced
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Split the result of a training or test step into the metrics' states and the logs."""
        parts = np.split(vector, np.cumsum([zero.size for zero in self._zero]))
        state = [part.reshape(zero.shape) for part, zero in zip(parts, self._zero, strict=False)]
        return state, dict(zip(traced.log_names, parts[-1].tolist(), strict=True))

    def _trace(self, kind: str, signature: list[tf.TensorSpec], data: Any) -> Traced:
        names: list[str] = []
        step = self._steps[kind]

        def run(constants: Sequence[tf.Tensor], ticket: tf.Tensor, data: Any) -> Any:
            with in_step(self.constants, constants):
                if kind == "predict":
                    return step(data)
                return self._counted(step, ticket, data, names)

        constants = [tf.TensorSpec.from_tensor(value) for value in self.values()]
        # Traced here, not by the coordinator: under its strategy, Keras's optimizers would ask for a replica context.
        with watched(metrics_of(self._model)) as calls:
            function = tf.function(run, autograph=False).get_concrete_function(
                constants, tf.TensorSpec([2], tf.int64), tf.nest.pack_sequence_as(data, signature)
            )
        self._summed.learn(calls.updates, int(signature[0].shape[0]))
        return Traced(function, signature, names)

    def _counted(
        self, step: Callable[[Any], Any], ticket: tf.Tensor, data: Any, names: list[str]
    ) -> tf.Tensor:
        """Run `step` with metrics at zero; return the metrics' states after it, and its logs, as one vector."""
        before = [v.value.read_value() for v in self._statistics]
        with in_step([*self.metrics, *self._statistics], [*map(tf.constant, self._zero), *before]):
            logs = step(data)
            state = [v.value for v in self.metrics]
            after = [v.value for v in self._statistics]
        updating = arrival(self._model.optimizer)
        with tf.control_dependencies(updating):
            for variable, old, new in zip(self._statistics, before, after, strict=True):
                if new is not old:
                    _add_difference(variable.value, old, new)
            if updating:
                self._applied.scatter_nd_update([ticket[:1]], ticket[1:])
        names[:] = sorted(logs)
        # One number for each log.
        values = [*state, *(tf.reduce_mean(logs[name]) for name in names)]
        return tf.concat([tf.reshape(tf.cast(v, tf.float64), [-1]) for v in values], 0)


def _beside_weights(model: keras.Model, value: tf.Tensor) -> tf.Variable:
    """Create a variable on the server that holds the first weight."""
    weights = [part for v in model.trainable_variables for part in tf_variables(v)]
    with tf.init_scope(), tf.device(weights[0].device if weights else None):
        return tf.Variable(value, trainable=False)


def _takes(known: tf.TensorSpec, given: tf.TensorSpec) -> bool:
    return known.dtype == given.dtype and known.shape.is_compatible_with(given.shape)


def _add_difference(variable: tf.Variable, old: tf.Tensor, new: tf.Tensor) -> None:
    if variable.dtype.is_bool or variable.dtype == tf.string:
        variable.assign(new)
    else:
        variable.assign_add(new - old)
