"""CheckpointCallback: checkpoints for `model.fit`; a run that was killed resumes after its last complete epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from hvdtrain.checkpoint.callback_states import CallbackStates, continue_files
from hvdtrain.checkpoint.lock import this_process
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.position import FitPosition
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.corrections import correct
from hvdtrain.keras_internals.models import is_built, optimizers_of
from hvdtrain.keras_internals.optimizers import optimizer_slots
from hvdtrain.messages import logger


class CheckpointCallback(keras.callbacks.Callback):
    """Saves a checkpoint after every epoch of `model.fit`; the same script, run again, continues from the newest one.

    For `model.fit` with `hvdtrain.keras.DistributedOptimizer`; with a Trainer, use its `checkpoints` argument. Pass the
    callback on every rank, anywhere in the list: it always acts last. A checkpoint holds the model, its optimizer,
    random generators, and the state of the other callbacks, including the History that `fit` returns.

    Keras can start only at the beginning of an epoch, so an interrupted epoch is trained again. `fit` shuffles arrays
    in an order that starts anew in each process: the result equals that of an uninterrupted run only with
    `shuffle=False`, or with data whose order depends on nothing but the epoch. The Trainer has neither limit.

    Args:
        folder: Folder for the checkpoints of this `fit` alone; created and locked by rank 0.
        every_epochs: Number of epochs between two checkpoints; one is always saved after the last epoch.
        keep: Number of checkpoints to keep, at least 2.

    Raises:
        UsageError: If a number is too small. From `fit`, on all ranks: if the model has changed, all checkpoints are
            damaged, another process uses the folder, or this callback has already been used in a completed `fit`.
    """

    hvdtrain_on_all_ranks = True

    def __init__(self, folder: str | Path, *, every_epochs: int = 1, keep: int = 2) -> None:
        super().__init__()
        require_integer("CheckpointCallback: every_epochs", every_epochs)
        require_integer("CheckpointCallback: keep", keep, 2)
        self._folder = Path(folder)
        self._every_epochs = every_epochs
        self._keep = keep
        self._manager: CheckpointManager | None = None
        self._others: list[Any] = []
        self._optimizers: list[Any] = []
        self._states: CallbackStates | None = None
        self._epochs_done = 0
        self._has_ended = False
        correct(keras.callbacks.CallbackList, "on_train_begin", _begin)

    def find(self, others: list[keras.callbacks.Callback]) -> None:
        """Look for a checkpoint before the other callbacks of this fit start. A collective.

        Args:
            others: All callbacks of this fit that are no CheckpointCallback.

        Raises:
            UsageError: On all ranks; see the class.
        """
        model = self.model
        if self._has_ended:
            raise UsageError(
                f"CheckpointCallback({str(self._folder)!r}) was already used by a fit that has finished: "
                "create a new one, with its own folder if this is a different run"
            )
        if self._manager is not None:  # An earlier fit failed.
            self._manager.close()
        self._others = [getattr(one, "hvdtrain_wrapped", one) for one in others]
        self._optimizers = optimizers_of(model)
        self._manager = CheckpointManager(self._folder, model, *self._optimizers, keep=self._keep)
        position = self._manager.latest()
        if position is None:
            self._epochs_done = 0
            return
        self._epochs_done = position["step"]
        self._build(position)
        continue_files(self._others, self._epochs_done)

    def _build(self, position: dict[str, Any]) -> None:
        """Build the model and the optimizers as they were when the checkpoint was saved, as the first batch would."""
        model = self.model
        if "trained" not in position or len(position["trained"]) != len(self._optimizers):
            raise UsageError(
                f"folder {str(self._folder)!r} has checkpoints of another run: choose another folder"
            )
        if not is_built(model):
            model.build_from_config(position["build"])
        weights = model.trainable_variables
        for optimizer, trained in zip(self._optimizers, position["trained"], strict=True):
            if trained and not optimizer.built and max(trained) < len(weights):
                optimizer.build([weights[number] for number in trained])

    def _trained(self, optimizer: Any) -> list[int]:
        """Return the indices of the model's weights that `optimizer` trains; none before it is built."""
        numbers = {id(v): number for number, v in enumerate(self.model.trainable_variables)}
        slots = optimizer_slots(optimizer)
        return [numbers[id(v)] for v, _ in slots if id(v) in numbers] if optimizer.built else []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        assert self._manager is not None
        self._states = CallbackStates(self._others)
        if self._epochs_done == 0:
            return
        position = self._manager.restore()
        assert position is not None
        self._states.give(position["callbacks"])
        epochs = self.params["epochs"]
        ended = position["stopped"] or self._epochs_done >= epochs
        if ended and position["process"] == this_process():
            raise UsageError(
                f"CheckpointCallback({str(self._folder)!r}): an earlier fit in this process already completed "
                "all its epochs in this folder: give each fit its own folder"
            )
        self.model._initial_epoch = epochs if ended else self._epochs_done
        if ALL_RANKS.rank() == 0:
            found = FitPosition(self._epochs_done, stopped=position["stopped"])
            logger().info("folder %r: %s", str(self._folder), found.describe(epochs))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.model._initial_epoch = None  # Otherwise the next fit of this model would begin there.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epochs_done = epoch + 1
        last = self._epochs_done == self.params["epochs"] or self.model.stop_training
        if last or self._epochs_done % self._every_epochs == 0:
            assert self._manager is not None and self._states is not None
            self._manager.save(
                self._epochs_done,
                callbacks=self._states.take(),
                stopped=bool(self.model.stop_training),
                build=_plain(self.model.get_build_config()),
                trained=[self._trained(one) for one in self._optimizers],
                process=this_process(),
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        assert self._manager is not None
        self.model._initial_epoch = None
        self._manager.close()
        self._manager = None
        self._has_ended = True


def _begin(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace CallbackList.on_train_begin: each CheckpointCallback first looks for a checkpoint, and moves to the end.

    There it saves what the other callbacks did at the end of an epoch, and what those broadcast as training begins does
    not overwrite a rank's restored state.
    """
    own = [c for c in self.callbacks if isinstance(c, CheckpointCallback)]
    if own:
        others = [c for c in self.callbacks if not isinstance(c, CheckpointCallback)]
        self.callbacks = [*others, *own]
        for callback in own:
            callback.find(others)
    return original(self, *args, **kwargs)


def _plain(value: Any) -> Any:
    """Convert the dicts, lists and tuples that Keras tracks to Python's own."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(map(_plain, value))
    return value
