"""Strategy: what the Trainer asks of a way to run training steps on all workers.

The base class is the simplest way: one process that trains alone, as plain Keras would. Sub-classes lay
over it what they do otherwise; all of them keep the Trainer's contract, that losses, metrics, predictions and
weights are those of one worker with the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import keras

from hvdtrain.collectives.metrics import as_value
from hvdtrain.data import Part, Share
from hvdtrain.keras_internals.models import metrics_or_logs, optimizers_of, symbolic_inputs
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.model_file import read_model, require_built, write_model

Logs = dict[str, Any]
ModelSource: TypeAlias = Any
"""A keras.Model, or a function without arguments that builds one; Keras brings no types."""


class Steps(Protocol):
    """The steps of one prepared model."""

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares` one after the other; return the running logs of this process.

        There are several with `steps_per_execution`: all of one size, none of them empty.
        """

    def test(self, share: Share) -> Logs:
        """Update the metrics from `share`; return the running logs of this process."""

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share` (an idle rank's: for its filler)."""

    def finish(self) -> None:
        """Wait for all that was started; what the model and its metrics hold is complete then."""


class Strategy:
    """One process, no communication.

    Attributes:
        name: as in `Trainer(strategy=...)`.
        workers: how many compute a step together; at most one per example of the global batch.
        part: which share of each global batch this process reads.
        is_first: whether this process writes files and talks to the terminal.
        several_optimizers: whether a train_step of the model's own may use more than one.
        saves_together: no rank has the whole model and optimizer, so `save` is the only way to save them.
    """

    name: ClassVar[str] = "alone"

    def __init__(self) -> None:
        self.workers = 1
        self.part = Part(0, 1)
        self.is_first = True
        self.several_optimizers = False
        self.saves_together = False

    def start(self, seed: int) -> Rank:
        """Join the job, before TensorFlow's devices are in use; return who this process is."""
        return init(seed)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which the model, its optimizer and its metrics are made."""
        return nullcontext()

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model that this process trains; a function is called to build it."""
        with self.scope():
            return model if isinstance(model, keras.Model) else model()

    def inputs(self, model: keras.Model) -> list[Any]:
        """Return the symbolic inputs that data is for, flat; [] if the model has none yet."""
        return symbolic_inputs(model)

    def distribute(self, optimizer: Any) -> Any:
        """Return the optimizer that the model is compiled with."""
        return optimizer

    def prepare(self, model: keras.Model, data: Any, what: str) -> Steps:
        """Create all variables of a compiled model, alike for all workers, and return its steps.

        Args:
            model: what `build` returned, compiled.
            data: (x, y, sample_weight) of one share, as Keras's symbolic tensors.
            what: "training" or "evaluation", for messages.
        """
        raise NotImplementedError

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> Steps:
        """Create the variables of `model` for symbolic `inputs`; return steps that can only predict."""
        raise NotImplementedError

    def probe(self, steps: Steps, share: Share) -> None:
        """Before the first step: raise UsageError, on all ranks, if the steps of parts do not make that of a batch."""

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        """Give all workers the first one's weights, statistics and optimizer state, except `without`."""

    def check_step(self, model: keras.Model, when: str) -> None:
        """Raise ReplicaError if what every step must leave equal (weights) differs between workers."""

    def check(self, model: keras.Model, when: str) -> None:
        """Raise ReplicaError if anything that is replicated differs between workers."""

    def reset_metrics(self, model: keras.Model) -> None:
        """Start counting from zero."""
        model.reset_metrics()

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        """Return the values since the metrics' reset, over all workers: equal on every rank.

        Args:
            step_logs: what the last step returned on this process.
            share: of the last step.
        """
        return {n: as_value(v) for n, v in metrics_or_logs(model, step_logs).items()}

    def end_epoch(self, model: keras.Model) -> None:
        """Make the statistics of all workers one (BatchNormalization's moving averages)."""

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        """Return the outputs for all examples, in their order, on every rank."""
        return gather_predictions(outputs)

    def save(self, model: keras.Model, path: Path) -> None:
        """Write the whole model with its optimizer's state to `path`; plain Keras loads it.

        All ranks call it; the file is complete or absent.
        """
        write_model(model, path)

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]:
        """In this block callbacks that save find in rank 0's optimizer what one process would have."""
        return nullcontext()

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]:
        """Around callbacks that may restore the model on rank 0 alone; `broadcast` follows."""
        return nullcontext()

    def load(self, model: keras.Model, path: Path) -> None:
        """Give `model` and its optimizer what `save`, or plain Keras, wrote to `path`.

        All ranks call it; the first one reads the file. Random seeds are not in a file, and stay.

        Raises:
            UsageError: on all ranks: the file does not fit, or the model has no variables yet.
        """
        self.build_to_load(model)
        read_model(model, path)

    def build_to_load(self, model: keras.Model) -> None:
        """Create the optimizer's variables, to be loaded; UsageError if the model has none yet itself."""
        require_built(model)
        self.build_optimizer(model)

    def build_optimizer(self, model: keras.Model) -> None:
        """Create the optimizer's variables, if they are not there, for a model that has its own."""
        (optimizer, *others) = optimizers_of(model)
        if not others and not optimizer.built:
            with self.scope():
                optimizer.build(model.trainable_variables)
