"""Horovod's Keras callbacks: broadcast of the initial variables, averaged metrics, learning rates, the best model.

`BroadcastGlobalVariablesCallback` does more than its name suggests. Before the first step it compares the ranks'
settings, so that a different number of steps or a different model ends the job at once instead of hanging it.
After the first step and after every epoch it compares the ranks' weights. The cost is one pass over the weights per
epoch (1 ms per 10 MB) and a few collectives of some bytes.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Max
from hvdtrain.collectives.consistency import require_equal
from hvdtrain.collectives.finite import FiniteWatch
from hvdtrain.collectives.gradient_accumulation import spread_accumulators
from hvdtrain.collectives.metrics import as_value
from hvdtrain.collectives.placement import on_device
from hvdtrain.collectives.replicas import broadcast_variables, check_replicas
from hvdtrain.collectives.statistics import average_statistics
from hvdtrain.errors import ReplicaError, UsageError
from hvdtrain.keras.epoch_metrics import Counted
from hvdtrain.keras.learning_rate import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from hvdtrain.keras.learning_rate import LearningRateWarmupCallback as LearningRateWarmupCallback
from hvdtrain.keras_internals.models import is_built, optimizers_of, refresh_constants
from hvdtrain.keras_internals.optimizer_state import broadcast_loaded_state, is_sharded
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    seed_variables,
    tf_variable,
    trained_variables,
    variable_name,
    without,
)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the variables of one rank before the first step, and checks that they stay equal on all ranks.

    The random seeds of layers are broadcast as well, and then made different on each rank (rank 0 keeps them). Moving
    statistics (all floating-point variables that are not trained) are averaged over the ranks at the end of each epoch,
    before validation if the number of steps is known. Other state, such as a queue of examples, belongs in
    `local_variables`. Variables that the first batch creates are broadcast after it: begin a Sequential model
    with keras.Input, or build the model, so that the first step is that of one model.

    Args:
        root_rank: Rank whose variables are broadcast.
        device: Device for the broadcast. Default: Horovod's choice.
        local_variables: One or more Keras variables or tf.Variables to leave as they are on each rank.
        guard: Compare the replicas after the first step and after every epoch, and warn if a weight is nan or inf.

    Raises:
        UsageError: An item of `local_variables` is not a variable.
        ReplicaError: From fit, on all ranks: the ranks differ in steps, epochs, optimizer or shapes of variables, the
            replicas have drifted apart, or the ranks end the training after different epochs.
    """

    hvdtrain_on_all_ranks = True

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        guard: bool = True,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._guard = guard
        self._local: list[Any] = []
        self._broadcast_count = 0
        self._first_batch_done = self._first_step_checked = False
        self._finite = FiniteWatch()
        self._epoch = 0
        self._averaged = False
        if local_variables is None:
            local_variables = []
        elif isinstance(local_variables, keras.Variable | tf.Variable):
            local_variables = [local_variables]
        for variable in local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude `var`, a Keras variable or tf.Variable, from the broadcast.

        Raises:
            UsageError: `var` is not a variable.
        """
        if not isinstance(var, keras.Variable | tf.Variable):
            raise UsageError(f"local_variables: {var!r} is not a variable")
        self._local.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._first_batch_done = self._first_step_checked = False
        self._finite = FiniteWatch()
        # fit has built the model and its optimizer by now; a loop that calls callbacks itself may not have.
        optimizer = self.model.optimizer
        if is_built(self.model) and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        require_equal(self._facts(), "training")
        spread_accumulators(optimizers_of(self.model), self.root_rank)
        self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._averaged = False
        if self._guard:
            _agree_on_course(f"begins epoch {epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._first_batch_done and self._broadcast_count != self._count_variables():
            self._broadcast()  # The first batch created variables; Horovod also broadcasts them after it.
        self._first_batch_done = True
        if self._guard and not self._first_step_checked and self._has_updated(batch):
            self._first_step_checked = True
            # Without moving statistics, which differ between ranks after a step.
            self._check(trained_variables(self.model, self._local), "after the first step")
        steps = self.params.get("steps")
        # The last execution of several steps may be numbered beyond the epoch's end.
        if steps and batch + 1 >= steps:
            self._average_statistics()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._averaged:
            self._average_statistics()
        if self._guard:
            variables = replicated_variables(self.model, local=self._all_local())
            self._check(variables, f"after epoch {epoch + 1}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._guard:
            _agree_on_course(f"stops training after epoch {self._epoch + 1}")

    def _check(self, variables: list[Any], when: str) -> None:
        check_replicas(variables=variables, when=when)
        if ALL_RANKS.rank() == 0:
            self._finite.look(self.model.trainable_variables, when)

    def _facts(self) -> dict[str, Any]:
        """Return settings that must be the same on all ranks, or one would wait for another forever."""
        optimizers = optimizers_of(self.model)
        inner = [inner_of(one) for one in optimizers]
        facts = {
            "the number of steps in an epoch": self.params.get("steps"),
            "the number of epochs": self.params.get("epochs"),
            "steps_per_execution": self.model.steps_per_execution,
            "the optimizers": [type(one).__name__ for one in inner],
            "the number of variables of each optimizer": [
                # Those of a sharded optimizer differ between ranks on purpose.
                0 if is_sharded(one) else len(one.variables)
                for one in optimizers
            ],
        }
        common = without(self.model.variables, self._all_local())
        facts["the number of variables"] = len(common)
        for number, variable in enumerate(common):
            # Keras's paths contain layer counts, which may differ between ranks; their last part does not.
            label = f"variable {number} ({variable_name(variable).split('/')[-1]})"
            facts[label] = f"{tf_variable(variable).dtype.name} {list(variable.shape)}"
        return facts

    def _all_local(self) -> list[Any]:
        return [*self._local, *local_variables(self.model)]

    def _broadcast(self) -> None:
        common = replicated_variables(self.model, local=self._local)
        with on_device(self.device):
            broadcast_variables([*common, *seed_variables(self.model)], self.root_rank)
        refresh_constants(self.model)
        for optimizer in optimizers_of(self.model):
            broadcast_loaded_state(optimizer)
        self._broadcast_count = self._count_variables()

    def _count_variables(self) -> int:
        return sum(len(one.variables) for one in [self.model, *optimizers_of(self.model)])

    def _average_statistics(self) -> None:
        average_statistics(self.model, self._all_local())
        self._averaged = True

    def _has_updated(self, batch: int) -> bool:
        """Whether the weights have been updated: with gradient accumulation, not in the first steps."""
        inner = [inner_of(one) for one in optimizers_of(self.model)]
        return batch + 1 >= max((one.gradient_accumulation_steps or 1 for one in inner), default=1)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, in place, for the callbacks after it in the list.

    Keras's own metrics get their exact result over all examples. Other values get the plain mean over the ranks, as in
    Horovod; a value that is the same on all ranks (a learning rate) is left unchanged. `hvdtrain.Trainer` also combines
    your own metrics.

    Args:
        device: Device for the allreduce. Default: Horovod's choice.

    Raises:
        ReplicaError: On all ranks, at the end of an epoch: a metric is missing on one rank, or its shape differs.
        UsageError: At the end of an epoch: a metric is not a number.
    """

    hvdtrain_on_all_ranks = True

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._counted: dict[str, Counted] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._counted = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._keep("")  # Validation is about to reset the training metrics.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if ALL_RANKS.size() == 1:
            return
        self._keep("val_" if self._counted else "")
        logs = {} if logs is None else logs
        values = {name: _as_array(name, value) for name, value in sorted(logs.items())}
        shapes = {f"metric {name!r}": list(value.shape) for name, value in values.items()}
        require_equal(shapes, f"averaging the metrics of epoch {epoch + 1}", "metric_names")
        if not values:
            return
        flat = np.concatenate([value.ravel() for value in values.values()])
        with on_device(self.device):
            total = ALL_RANKS.allreduce(flat, "hvdtrain_metrics").numpy()
            both = np.concatenate([flat, -flat])
            largest = ALL_RANKS.allreduce(both, "hvdtrain_metrics_range", Max).numpy()
        alike = largest[: flat.size] == -largest[flat.size :]
        mean = np.where(alike, flat, total / ALL_RANKS.size())
        ends = np.cumsum([value.size for value in values.values()])
        for (name, value), end in zip(values.items(), ends, strict=True):
            logs[name] = as_value(mean[end - value.size : end].reshape(value.shape))
        merged = [c.over_all_ranks(values, prefix) for prefix, c in self._counted.items()]
        for results in merged:
            logs.update(results)

    def _keep(self, prefix: str) -> None:
        if ALL_RANKS.size() > 1 and getattr(self.model, "compiled", False):
            self._counted.setdefault(prefix, Counted.of(self.model))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, on rank 0.

    Args:
        monitor: Metric to compare; put MetricAverageCallback before this callback.
        verbose: 1: print a line for each save.
        save_weights_only: Save only the weights; `filepath` must end in .weights.h5.
        mode: "auto", "min" or "max".
        save_freq: "epoch", or a number of batches.
        filepath: File to write. As with Horovod, it may be set later, as the attribute `filepath`.

    Raises:
        UsageError: From fit: `filepath` is not set.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: Any = None,
    ) -> None:
        super().__init__(
            # Keras requires a path here, and checks its suffix.
            filepath=filepath or ("later.weights.h5" if save_weights_only else "later.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.filepath:
            raise UsageError("BestModelCheckpoint: filepath is required")
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if ALL_RANKS.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if ALL_RANKS.rank() == 0:
            super().on_epoch_end(epoch, logs)


def _agree_on_course(what: str) -> None:
    """Raise ReplicaError on all ranks if some continue training and others stop. A collective."""
    everyone = ALL_RANKS.exchange(what, "course")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(
                f"The ranks disagree: rank 0 {everyone[0]}, rank {rank} {theirs}. Callbacks that "
                "stop training must see the same values on all ranks: put "
                "MetricAverageCallback before them."
            )


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"MetricAverageCallback: {name!r} is not a number: {value!r}") from None
