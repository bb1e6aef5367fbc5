"""Elastic training with Keras: workers may join and leave while the state of the training is kept in memory.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.CommitStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ])

    train(state)

Start it with `--min-np ... --host-discovery-script ...`, over Gloo. Horovod's KerasState does not work with Keras 3.
Other differences: values passed to KerasState are never pickled; `run` raises every error that is not Horovod's, where
Horovod's may return None instead; and the training step is traced again when the number of workers changes.
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
from hvdtrain.collectives.replicas import broadcast_variables
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import is_built
from hvdtrain.keras_internals.optimizer_state import is_in_parts
from hvdtrain.keras_internals.variables import (
    replicated_variables,
    seed_variables,
    tf_variable,
    unique,
)
from hvdtrain.runtime import start_horovod

_HOROVOD = ("horovod", "hvdtrain_")
"""One of these is in the message of every failed collective: Horovod's text, its operation or our name for it."""


class TensorFlowState(ObjectState):
    """The state of a custom training loop: variables, and values such as batch and epoch.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every worker.
        session: for TensorFlow 1; not used.
        kwargs: attributes of the state, of the types that `broadcast_object` accepts.

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
        """Store the current state, to return to after a failure."""
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        """Return to the state that was stored last."""
        for variable, value in zip(self.variables, self._values, strict=True):
            tf_variable(variable).assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcast the state of rank 0 to all workers. A collective."""
        with _horovod_errors():
            self._broadcast()
            self._values = self._read()
            super().sync()

    def _broadcast(self) -> None:
        broadcast_variables(self.variables)

    def _read(self) -> list[np.ndarray]:
        return [np.array(tf_variable(v).numpy()) for v in self.variables]


class KerasState(TensorFlowState):
    """The state of `model.fit`: a model, its optimizer, and values such as batch and epoch.

    Args:
        model: a built model.
        optimizer: its optimizer. Default: the one that the model was compiled with.
        kwargs: attributes of the state, of the types that `broadcast_object` accepts.

    Raises:
        UsageError: the model is not built, or has no optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise UsageError(
                "KerasState: build the model first, with model.build(input_shape) or by calling it on a "
                "batch"
            )
        self.model = model
        self.optimizer: Any = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise UsageError("KerasState: compile the model or pass an optimizer")
        if is_in_parts(self.optimizer):
            raise UsageError(
                "KerasState: a sharded optimizer cannot continue with a different number of "
                "workers: use DistributedOptimizer"
            )
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([*model.variables, *self.optimizer.variables], **kwargs)

    def reset(self) -> None:
        """Discard the traced steps, in which the number of workers is a constant."""
        self.model.train_function = self.model.test_function = None

    def _broadcast(self) -> None:
        with_seeds = [
            *replicated_variables(self.model, self.optimizer),
            *seed_variables(self.model),
        ]
        broadcast_variables(with_seeds)
        fold_rank_into_seeds(self.model, hvd.rank())


class TensorFlowKerasState(KerasState):
    """KerasState under the name that custom training loops use in Horovod.

    Args:
        model: a built model.
        optimizer: its optimizer. Default: the one that the model was compiled with.
        backend: for TensorFlow 1; not used.
        kwargs: attributes of the state, of the types that `broadcast_object` accepts.
    """

    def __init__(
        self, model: keras.Model, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that runs `func(state, ...)` again from the last commit whenever workers have joined or left.

    Args:
        func: function that trains; its first argument is a KerasState, or another of Horovod's states.
    """

    @functools.wraps(func)
    def attempt(state: Any, *args: Any, **kwargs: Any) -> Any:
        with _horovod_errors():
            return func(state, *args, **kwargs)

    return run_fn(attempt, _reset)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits `state` after every `batches_per_commit` batches, and at the end of each epoch.

    Args:
        state: a KerasState, or another of Horovod's states.
        batches_per_commit: number of batches between commits. Fewer lose less work when a worker fails; each commit
            copies the state.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Workers that joined count from here, so all do.
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
        state: a KerasState with the attribute `batch`.
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
    """Keeps the number of finished epochs in `state.epoch`, across resets, after which fit counts from 0 again.

    Put it before CommitStateCallback.

    Args:
        state: a KerasState with the attribute `epoch`.
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
    """Turn the TensorFlow error of a failed collective into HorovodInternalError, which means: try again."""
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
        # Horovod's own, of what it knows of hosts: their change is a flag, which travels as its number.
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
