"""Elastic training with Keras: workers may join and leave, and the state of the training is kept in memory.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

    train(state)

Start it with `--min-np ... --host-discovery-script ...`, over Gloo. Horovod's own KerasState does not work with Keras
3. Other differences from Horovod: values passed to KerasState are never pickled; `run` raises every error that is not
Horovod's, where Horovod's `run` may return None; and the training step is traced again when the number of workers
changes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.gradient_accumulation import spread_accumulators
from hvdtrain.collectives.replicas import broadcast_variables
from hvdtrain.collectives.tensor_names import InstanceName, name_by_places
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals.models import is_built, optimizers_of, refresh_constants
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import is_distributed
from hvdtrain.keras_internals.variables import (
    assign,
    replicated_variables,
    seed_variables,
    tf_variable,
    unique,
)
from hvdtrain.runtime import start_horovod

_HOROVOD = ("horovod", "hvdtrain_")
"""Every failed collective has one of these in its message: from Horovod's text, or the name of the operation."""


class TensorFlowState(ObjectState):
    """State of a custom training loop: variables, and values such as batch and epoch.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every worker.
        session: For TensorFlow 1; not used.
        kwargs: Further values, which become attributes of the state, of the types that `broadcast_object` accepts.

    Raises:
        UsageError: `variables` is missing.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        del session
        if not variables:
            raise UsageError("TensorFlowState: pass the variables to keep, variables=[...]")
        self.variables = unique(variables)
        self._values = self._read()
        super().__init__(bcast_object=_from_first_rank, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Store a copy of the current state in memory, to return to it after a failure."""
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        """Return to the state that was stored last."""
        assign(self.variables, self._values)
        super().restore()

    def sync(self) -> None:
        """Broadcast the state of rank 0 to all workers. A collective."""
        with _horovod_errors():
            self._broadcast()
            self._values = self._read()
            super().sync()

    def reset(self) -> None:
        """Forget names that new workers do not know: a fit in on_reset callbacks must not wait for them."""
        name_by_places([], [])

    def take_places(self) -> None:
        """Name collectives by the places in the state, which all workers have: after a sync, or if nobody joined."""
        name_by_places(self._names(), self.variables)

    def _names(self) -> list[InstanceName]:
        return []

    def _broadcast(self) -> None:
        self.take_places()
        broadcast_variables(self.variables)

    def _read(self) -> list[np.ndarray]:
        return [np.array(tf_variable(v).numpy()) for v in self.variables]


class KerasState(TensorFlowState):
    """State of `model.fit`: a model, its optimizer, and values such as batch and epoch.

    Args:
        model: A built model.
        optimizer: Optimizer of the model. Default: those of the model, of compile and in its attributes.
        kwargs: Further values, which become attributes of the state, of the types that `broadcast_object` accepts.

    Raises:
        UsageError: The model or an optimizer is not built, it has no optimizer, or a sharded one.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise UsageError(
                "KerasState: build the model first, with model.build(input_shape) or by calling it on a "
                "batch"
            )
        self.model = model
        self._given = optimizer
        optimizers = self._optimizers()
        if not optimizers:
            raise UsageError("KerasState: compile the model or pass an optimizer")
        self.optimizer: Any = optimizers[0]
        if any(map(is_sharded, optimizers)):
            raise UsageError(
                "KerasState: a sharded optimizer cannot continue with a different number of "
                "workers: use DistributedOptimizer"
            )
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        for one in optimizers:
            if not one.built:
                raise UsageError(
                    f"KerasState: build the optimizer {one.name!r}, which is an attribute of the model: "
                    "optimizer.build(variables)"
                )
        state = [variable for one in optimizers for variable in one.variables]
        super().__init__([*model.variables, *state], **kwargs)

    def reset(self) -> None:
        """Discard the traced steps, which contain the number of workers as a constant, and names of collectives."""
        super().reset()
        self.model.train_function = self.model.test_function = None

    def take_places(self) -> None:
        self.reset()
        super().take_places()

    def _broadcast(self) -> None:
        self.take_places()
        spread_accumulators(self._optimizers())
        with_seeds = [
            *replicated_variables(self.model, self._given),
            *seed_variables(self.model),
        ]
        broadcast_variables(with_seeds)
        refresh_constants(self.model)

    def _optimizers(self) -> list[Any]:
        return optimizers_of(self.model) if self._given is None else [self._given]

    def _names(self) -> list[InstanceName]:
        """Return the names of the collectives of the optimizers and of synchronized layers."""
        reducers = [reducer_of(one) for one in self._optimizers() if is_distributed(one)]
        holders = [*reducers, *self.model._flatten_layers()]
        found = [getattr(holder, "collective_name", None) for holder in holders]
        return [name for name in found if isinstance(name, InstanceName)]


class TensorFlowKerasState(KerasState):
    """KerasState under Horovod's name for custom training loops.

    Args:
        model: A built model.
        optimizer: As in KerasState.
        backend: For TensorFlow 1; not used.
        kwargs: Further values, which become attributes of the state, of the types that `broadcast_object` accepts.

    Raises:
        UsageError: As in KerasState.
    """

    def __init__(
        self, model: keras.Model, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `func` so that `func(state, ...)` is run again from the last commit when workers join or leave.

    Args:
        func: Function that trains; its first argument is a KerasState, or another of Horovod's states.
    """

    @functools.wraps(func)
    def attempt(state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, TensorFlowState):
            state.take_places()  # Horovod makes no sync if workers have only left.
        with _horovod_errors():
            return func(state, *args, **kwargs)

    return run_fn(attempt, _reset)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits `state` after every `batches_per_commit` batches, and at the end of each epoch.

    Args:
        state: A KerasState, or another of Horovod's states.
        batches_per_commit: Number of batches between commits. With fewer, less work is lost when a worker fails, but
            each commit copies the state.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # New workers start to count here, so the others must as well.
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the number of finished batches of the current epoch in `state.batch`, across resets; 0 between epochs.

    Put it before CommitStateCallback. In Keras 3 a callback cannot shorten an epoch: to skip the batches that were
    trained before a reset, train the rest of that epoch first,

        if state.batch:
            model.fit(..., steps_per_epoch=steps - state.batch, epochs=1)

    Args:
        state: A KerasState with the attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_batch = state.batch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.initial_batch = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self.initial_batch + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self.initial_batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps the number of finished epochs in `state.epoch`, across resets (after which fit counts from 0 again).

    Put it before CommitStateCallback.

    Args:
        state: A KerasState with the attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1


@contextmanager
def _horovod_errors() -> Iterator[None]:
    """Turn the TensorFlow error of a failed collective into HorovodInternalError, on which Horovod tries again."""
    try:
        yield
    except tf.errors.OpError as error:
        if is_horovods(error):
            raise HorovodInternalError(error) from error
        raise


def is_horovods(error: tf.errors.OpError) -> bool:
    """Whether a failed collective raised `error`."""
    text = error.message.lower()
    return any(word in text for word in _HOROVOD)


def _from_first_rank(obj: Any) -> Any:
    if isinstance(obj, tuple):
        # Horovod's host update, whose flag is sent as an integer.
        obj = tuple(int(part) if isinstance(part, enum.IntFlag) else part for part in obj)
    return ALL_RANKS.exchange(obj if hvd.rank() == 0 else None, "state")[0]


def _reset() -> None:
    hvd.shutdown()
    start_horovod()


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
