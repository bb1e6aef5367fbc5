"""Strategy: the interface between the Trainer and a way to run training steps on all workers.

The defaults are those of one process; subclasses make the steps, and override what differs. All of them keep the
Trainer's contract: losses, metrics, predictions and weights are those of one worker with the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.collectives.metrics import as_value
from hvdtrain.data import Part, Share
from hvdtrain.keras_internals.models import metrics_or_logs, optimizers_of, symbolic_inputs
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.model_file import read_model, require_built, write_model

Logs = dict[str, Any]
ModelSource: TypeAlias = Any
"""A keras.Model, or a function without arguments that builds one; Keras has no type annotations."""


class Steps:
    """Interface of the steps of one prepared model."""

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, one after another; return the running logs of this process.

        With `steps_per_execution` there are several shares, all of one size and none of them empty.
        """
        raise NotImplementedError

    def test(self, share: Share) -> Logs:
        """Update the metrics from `share`; return the running logs of this process."""
        raise NotImplementedError

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share` (on an idle rank, for its filler example)."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for steps that run in the background, so that the model and its metrics are up to date."""

    def probe(self, share: Share) -> None:
        """Before the first step: raise UsageError on all ranks if the steps on parts of a batch do not add up."""

    def probe_test(self, share: Share) -> None:
        """Before the first test step: learn, and warn of, how losses and means depend on the batch."""

    def probe_predict(self, share: Share) -> None:
        """Before the first prediction: warn of outputs that depend on the other examples of a batch."""


def in_order(count: int, run: Callable[[Any], Any]) -> Any:
    """Call `run` with 0, 1, ... below `count`, one after the other in a graph too, and return the last result."""
    if tf.executing_eagerly():
        for number in range(count):
            result = run(number)
        return result
    # Sequentially: two collectives in flight must not have the same name.
    _, result = tf.while_loop(
        lambda number, _: number < count,
        lambda number, _: (number + 1, run(number)),
        (tf.constant(1), run(0)),
        parallel_iterations=1,
    )
    return result


class Strategy:
    """Interface; the defaults are those of one process.

    Attributes:
        name: Name for `Trainer(strategy=...)`.
        workers: Number of workers that compute a step together; at most one per example of the global batch.
        part: Share of each global batch that this process reads.
        is_first: Whether this process writes files and prints to the terminal.
        several_optimizers: Whether the model's own train_step may use more than one optimizer.
        saves_together: Whether no rank has the whole model and optimizer, so that only `save` can save them.
    """

    name: ClassVar[str] = "alone"

    def __init__(self) -> None:
        self.workers = 1
        self.part = Part(0, 1)
        self.is_first = True
        self.several_optimizers = False
        self.saves_together = False

    def start(self, seed: int) -> Rank:
        """Join the job, before TensorFlow's devices are in use; return this process's place in it."""
        return init(seed)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which the model, its optimizer and its metrics are made."""
        return nullcontext()

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model that this process trains; a function is called to build it."""
        with self.scope():
            return model if isinstance(model, keras.Model) else model()

    def inputs(self, model: keras.Model) -> list[Any]:
        """Return the model's symbolic inputs, as a flat list; [] if it has none yet."""
        return symbolic_inputs(model)

    def distribute(self, optimizer: Any) -> Any:
        """Return the optimizer to compile the model with, in place of the user's."""
        return optimizer

    def prepare(self, model: keras.Model, data: Any, what: str) -> Steps:
        """Create all variables of a compiled model, equal on all workers, and return its steps.

        Args:
            model: The model that `build` returned, compiled.
            data: (x, y, sample_weight) of one share, as Keras's symbolic tensors.
            what: "training" or "evaluation", for messages.
        """
        raise NotImplementedError

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> Steps:
        """Create the variables of `model` for symbolic `inputs`; return steps that can only predict."""
        raise NotImplementedError

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        """Broadcast the weights, statistics and optimizer state of the first worker to all others, except `without`."""

    def check_step(self, model: keras.Model, when: str) -> None:
        """Raise ReplicaError if the weights, which every step must leave equal, differ between workers."""

    def check(self, model: keras.Model, when: str) -> None:
        """Raise ReplicaError if anything that is replicated differs between workers."""

    def reset_metrics(self, model: keras.Model) -> None:
        """Reset the metrics."""
        model.reset_metrics()

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        """Return the metrics since their reset over all workers, equal on every rank.

        Args:
            model: Model whose metrics are returned.
            step_logs: Logs that the last step returned on this process.
            share: Share of the last step.
        """
        return {n: as_value(v) for n, v in metrics_or_logs(model, step_logs).items()}

    def end_epoch(self, model: keras.Model) -> None:
        """Merge the workers' statistics (BatchNormalization's moving averages)."""

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        """Return the outputs for all examples, in order, on every rank."""
        return gather_predictions(outputs)

    def save(self, model: keras.Model, path: Path) -> None:
        """Write the whole model and its optimizer's state to `path`, as a file that plain Keras loads.

        All ranks call this. The file is complete or absent.

        Raises:
            UsageError: The file cannot be written.
        """
        write_model(model, path)

    def as_one_process(self, model: keras.Model) -> AbstractContextManager[None]:
        """Return a context in which rank 0's optimizer has the state of a single process, for callbacks that save."""
        return nullcontext()

    def restored_by_first(self, model: keras.Model) -> AbstractContextManager[None]:
        """Return a context for callbacks that may restore the model on rank 0 only; `broadcast` follows."""
        return nullcontext()

    def load(self, model: keras.Model, path: Path) -> None:
        """Load a file that `save` or plain Keras wrote to `path` into `model` and its optimizer.

        All ranks call this; the first one reads the file. Random seeds are not in the file and remain unchanged.

        Raises:
            UsageError: On all ranks: the file does not fit, or the model has no variables yet.
        """
        self.build_to_load(model)
        read_model(model, path)

    def build_to_load(self, model: keras.Model) -> None:
        """Create the optimizer's variables before loading; raise UsageError if the model has no variables yet."""
        require_built(model)
        self.build_optimizer(model)

    def build_optimizer(self, model: keras.Model) -> None:
        """Create the optimizer's variables, if they do not exist, for a model that has variables."""
        (optimizer, *others) = optimizers_of(model)
        if not others and not optimizer.built:
            with self.scope():
                optimizer.build(model.trainable_variables)
