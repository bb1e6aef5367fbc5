"""Trainer: fit, evaluate and predict with a Keras model on all workers, as one worker would.

It combines the other packages. Data sources (`data`) yield shares of global batches. A strategy (`strategies`, or
`parallel` for divided models) runs the steps on them, weighted by each rank's share of the batch; at the end of an
epoch it merges metrics, compares replicas and averages statistics. `model.fit` would give every rank the same weight,
however many examples it has, and a callback that stops training on one rank would leave the others waiting.

The cost over plain Keras: one pass over the variables after the first step and after each epoch, and a few
small collectives per epoch for metrics, statistics and the decision to stop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import keras

from hvdtrain.checkpoint.save_schedule import Checkpoints
from hvdtrain.collectives.consistency import require_alike, require_equal
from hvdtrain.data import Source
from hvdtrain.data.share import check_workers
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras.learning_rate import require_settable
from hvdtrain.keras_internals.models import keeps_rows, values_in_order
from hvdtrain.keras_internals.optimizers import inner_of, refuse_several
from hvdtrain.keras_internals.tracebacks import without_library_frames
from hvdtrain.strategies.skipped_steps import count_skipped_steps, skipping
from hvdtrain.strategies.strategy import ModelSource, Steps, Strategy
from hvdtrain.trackers.tracking import Tracking
from hvdtrain.trainer.callback_ranks import callback_facts
from hvdtrain.trainer.divergence import checked_policy, loss_watch
from hvdtrain.trainer.elastic_job import in_job
from hvdtrain.trainer.fit_record import FitRecord
from hvdtrain.trainer.learning_rate_scaling import Ramp, WarmUp, scale_learning_rate, scaled_by
from hvdtrain.trainer.loop import Loop, predict
from hvdtrain.trainer.plans import FitPlan
from hvdtrain.trainer.progress import Progress, resolve_verbose, showing
from hvdtrain.trainer.resume import fit_checkpoints
from hvdtrain.trainer.run_dir import RunDir
from hvdtrain.trainer.setup import (
    Compiled,
    as_callbacks,
    check_epochs,
    check_fixed_batch,
    check_split,
    compile_model,
    compiled_as,
    keras_file,
    make_model,
    one_or_all,
    refuse_batch_size,
    require_labels,
    samples_of,
    source_facts,
    split_arrays,
    symbolic_data,
    training_source,
)
from hvdtrain.trainer.strategy_choice import make_strategy

if TYPE_CHECKING:
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.strategies.round_plan import DiLoCo, LocalSGD
    from hvdtrain.trackers.tracker import Tracker


class Trainer:
    """Trains a Keras model on all workers of the job, or on one if the script runs without a launcher.

    Weights, losses and metrics do not depend on the number of workers, up to the order of floating-point sums. Two
    layers are exceptions: BatchNormalization normalizes over a worker's share of the batch (use
    hvdtrain.keras.SyncBatchNormalization), and dropout draws different masks on each worker.

    Args:
        model: A compiled or uncompiled keras.Model, or a function without arguments that builds one. A model whose
            class overrides `compile` (a GAN) must be compiled. If the class overrides `train_step`, every optimizer
            that it holds in an attribute is distributed.
        optimizer: Keras optimizer or its name. Default: that of the compiled model, or "rmsprop".
        loss: As in keras.Model.compile.
        metrics: As in keras.Model.compile.
        global_batch_size: Number of examples per step, over all workers. A batch size that is fixed in the model's
            inputs (batch_shape of a stateful RNN) is that of one worker's share.
        weighted_metrics: As in keras.Model.compile.
        loss_weights: As in keras.Model.compile.
        learning_rate_scaling: Factor for the learning rate: the number of workers ("linear"), its square root ("sqrt"),
            or 1 ("none", right if the global batch does not grow with the workers).
        warmup_epochs: Number of epochs over which the learning rate rises linearly from its unscaled value (from 0 with
            "none"). The rate must be a number, not a schedule.
        precision: "float32", "mixed_bfloat16", "mixed_float16" or another Keras dtype policy, set before the function
            `model` is called. A model passed as an instance must have been built with it. Default: the current one.
        run_dir: Folder for config.json, metrics.csv, events.jsonl and the final model.keras. Default: none.
        checkpoints: An hvdtrain.Checkpoints: when to save in run_dir. The same script, run again, resumes from there.
        trackers: Trackers of hvdtrain.trackers, or "mlflow", "tensorboard", "wandb"; rank 0 logs settings and metrics.
        resume: "auto": continue if run_dir holds a checkpoint; "must": fail without one; "never": fail with one.
        seed: Seed for initial weights (if `model` is a function) and for shuffling.
        jit_compile: Whether to compile training steps with XLA, except for what it cannot compile, such as collectives.
        run_eagerly: Whether to run steps without tf.function, for debugging.
        steps_per_execution: Number of steps to run between calls of the callbacks.
        strategy: "horovod", "tpu", "central-storage", "parameter-server" (`hvdtrain strategies` explains them) or a
            Strategy. Default: the one given to `hvdtrain run --strategy`, else "horovod".
        layout: An hvdtrain.Layout or hvdtrain.Mesh that divides the model over the ranks, or shares into micro-batches.
        shard_optimizer: Whether each rank keeps only its part of the optimizer's state (ZeRO-1).
        sync: hvdtrain.LocalSGD or hvdtrain.DiLoCo: each rank trains alone for some steps, for slow networks. The result
            then depends on the number of ranks. Default: every step is made together.
        guard: Whether to compare replicas after the first step and every epoch, and warn once of nan or inf in weights.
        on_nan: What to do about a nan or inf loss or gradient. "warn": only what `guard` does. "stop": raise
            DivergedError about a second later. "skip": let the step change nothing. "rewind": restore the weights and
            optimizer of the newest checkpoint, and continue with the next batch.
        probe: Whether to run the step, with several workers, on at most five examples first, whole and in parts, and
            refuse it if gradients do not add up (a loss that compares examples). Takes less time than the tracing.

    Attributes:
        model: The keras.Model that this process trains.
        rank: This process's place in the job, as hvdtrain.init returns it.

    Raises:
        UsageError: If an argument cannot work.
        ReplicaError: If the ranks disagree on the model, the data or the arguments, or drifted apart.
        EngineError: If Horovod stopped because another rank failed or did not arrive in time.
    """

    def __init__(
        self,
        model: ModelSource,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        *,
        global_batch_size: int,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none",
        warmup_epochs: float = 0,
        precision: str | None = None,
        run_dir: str | Path | None = None,
        checkpoints: Checkpoints | None = None,
        trackers: str | Tracker | Sequence[str | Tracker] | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        seed: int = 0,
        jit_compile: bool = False,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        strategy: str | Strategy | None = None,
        layout: Layout | Mesh | None = None,
        shard_optimizer: bool = False,
        sync: LocalSGD | DiLoCo | None = None,
        guard: bool = True,
        on_nan: Literal["warn", "stop", "skip", "rewind"] = "warn",
        probe: bool = True,
    ) -> None:
        self.strategy = make_strategy(strategy, layout, shard_optimizer, sync)
        self.seed = seed = require_integer("seed", seed, 0)
        self.rank = self.strategy.start(seed)
        global_batch_size = require_integer("global_batch_size", global_batch_size)
        steps_per_execution = require_integer("steps_per_execution", steps_per_execution)
        check_workers(global_batch_size, self.strategy.workers)
        self._on_nan = checked_policy(on_nan, self.strategy, saves=checkpoints is not None)
        self.global_batch_size = global_batch_size
        self._guard = guard
        self._probe = probe
        self._steps_per_execution = steps_per_execution
        self._warmup_epochs = warmup_epochs
        self._run_dir = RunDir(run_dir) if run_dir is not None else None
        self._tracking = Tracking(trackers, run_dir)
        self._saved = fit_checkpoints(checkpoints, resume, self._run_dir, self.strategy)
        self.model = make_model(model, precision, self.strategy.build)
        self._ramps: list[Ramp] = []
        given = {
            "optimizer": optimizer,
            "loss": loss,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "loss_weights": loss_weights,
        }
        compile_model(
            self.model,
            self.strategy,
            partial(self._distribute, scaling=learning_rate_scaling),
            given,
            jit_compile=jit_compile,
            run_eagerly=run_eagerly,
        )
        if on_nan == "skip":
            count_skipped_steps(self.model)
        self.steps: Steps | None = None  # Created with the model's variables, for the first data.
        # The same steps, or earlier ones that can only predict.
        self._predicting: Steps | None = None
        self._trained: Compiled | None = None  # What `steps` were compiled for.
        self._config: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "guard": guard,
            "jit_compile": jit_compile,
            "learning_rate_scaling": scaled_by(learning_rate_scaling, self.strategy.workers),
            "on_nan": on_nan,
            "checkpoints": None if checkpoints is None else checkpoints.facts(),
            "learning_rate": one_or_all([ramp.target for ramp in self._ramps]),
            "optimizer": one_or_all([type(ramp.optimizer).__name__ for ramp in self._ramps]),
            "probe": probe,
            "precision": self.model.dtype_policy.name,
            "seed": seed,
            "steps_per_execution": steps_per_execution,
            "strategy": self.strategy.name,
            "layout": repr(layout),
            "shard_optimizer": shard_optimizer,
            "sync": None if sync is None else repr(sync),
            "warmup_epochs": warmup_epochs,
        }

    @without_library_frames
    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: None = None,
        epochs: int = 1,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_steps: int | None = None,
        validation_batch_size: None = None,
        validation_freq: int | Collection[int] = 1,
        steps_per_epoch: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = True,
        sharded: bool = False,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        initial_epoch: int = 0,
        verbose: str | int = "auto",
    ) -> keras.callbacks.History:
        """Train for `epochs` epochs; return Keras's History, the same on every rank.

        Args:
            x: The data, in any form that hvdtrain.data.make_source accepts. A tuple is (x, y) or (x, y, sample_weight).
            y: Labels, if `x` is arrays.
            sample_weight: Weights of the examples, if `x` is arrays.
            batch_size: Refused; the Trainer's global_batch_size sets it.
            validation_batch_size: Refused, as batch_size.
            epochs: Number of the last epoch, from 1.
            validation_data: Data to evaluate on after an epoch, also divided over the workers.
            validation_split: Fraction of the arrays, taken from their end, to use as validation data instead.
            validation_steps: Number of global batches to evaluate on.
            validation_freq: Number of epochs between validations, or the epochs to validate after, such as [1, 3].
            steps_per_epoch: Number of global batches per epoch; required if the data never ends.
            class_weight: Weight of each class of integer or one-hot labels; a class that is missing has weight 1.
            shuffle: Whether to shuffle, by seed and epoch: in the same order for any number of workers.
            sharded: Whether `x` is this rank's own part of the data (its own list of files, Dataset.shard), from which
                it draws its share of every global batch. Steps are weighted by the number of examples on each rank; a
                rank whose part has ended idles until all have. The Trainer still divides `validation_data`.
            callbacks: A Keras callback or several. Those that only write (ModelCheckpoint, OrbaxCheckpoint,
                TensorBoard, CSVLogger, BackupAndRestore, RemoteMonitor) run on rank 0, all others on every rank. If
                each rank holds only part of the state (layout, shard_optimizer), ModelCheckpoint runs on all ranks and
                writes the whole model.
            initial_epoch: Index of the first epoch to train, from 0.
            verbose: 0 (silent), 1 (live view), 2 (a line per epoch and per minute) or "auto"; shown by rank 0.

        Raises:
            UsageError: If an argument or the data cannot work.
            ReplicaError: If the ranks disagree on the model, the data or the arguments, or drifted apart.
            DivergedError: If the loss or a weight became nan or inf, and on_nan ends the training.
            Preempted: If the job was asked to stop, and the training has saved a checkpoint.
            EngineError: If Horovod stopped because another rank failed or did not arrive in time.
        """
        refuse_batch_size("batch_size", batch_size, self.strategy.workers)
        refuse_batch_size("validation_batch_size", validation_batch_size, self.strategy.workers)
        check_epochs(epochs, initial_epoch, validation_freq)
        callbacks = as_callbacks(callbacks)
        if validation_split:
            check_split(validation_data, sharded)
            (x, y, sample_weight), validation_data = split_arrays(
                x, y, sample_weight, validation_split
            )
        train = self._source(
            (x, y, sample_weight),
            steps_per_epoch,
            sharded,
            shuffle=shuffle,
            class_weight=class_weight,
            training=True,
        )
        validation = None
        if validation_data is not None:
            if isinstance(validation_data, list):
                # As in Keras; in `x` a list means several inputs.
                validation_data = tuple(validation_data)
            validation = self._source((validation_data, None, None), validation_steps)
        require_labels(self.model, train, validation)
        if self._warmup_epochs:
            rising = WarmUp(self._ramps, self._warmup_epochs, train.steps_per_epoch)
            callbacks = [rising, *callbacks]
        show = resolve_verbose(verbose, self.rank)
        plan = FitPlan(train, validation, initial_epoch, epochs, validation_freq, callbacks, show)
        facts = plan.facts() | {"run_dir is given": self._run_dir is not None}
        with in_job(self.rank, self._saved):
            return self._prepare(train, "training", facts, validation).fit(plan)

    @without_library_frames
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        sharded: bool = False,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over all of the data, exact and the same on every rank.

        Args:
            x: As in `fit`.
            y: As in `fit`.
            sample_weight: As in `fit`.
            batch_size: Refused; the Trainer's global_batch_size sets it.
            sharded: As in `fit`.
            callbacks: As in `fit`.
            verbose: As in `fit`.
            steps: Number of global batches to evaluate on.
            return_dict: Whether to return a dict of values by name.

        Returns:
            As in Keras: a list of the loss and the metrics, the loss alone if there are no metrics, or the dict.

        Raises:
            UsageError: If an argument or the data cannot work.
            ReplicaError: If the ranks disagree on the model, the data or the arguments.
            EngineError: If Horovod stopped because another rank failed or did not arrive in time.
        """
        refuse_batch_size("batch_size", batch_size, self.strategy.workers)
        source = self._source((x, y, sample_weight), steps, sharded)
        require_labels(self.model, source)
        called = as_callbacks(callbacks)
        with in_job(self.rank, self._saved):
            loop = self._prepare(source, "evaluation", callback_facts(called))
            logs = loop.evaluate(source, called, resolve_verbose(verbose, self.rank))
        return logs if return_dict else values_in_order(self.model, logs)

    @without_library_frames
    def predict(
        self,
        x: Any,
        *,
        batch_size: None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
    ) -> Any:
        """Return the model's outputs for all examples, in their order, as NumPy arrays on every rank.

        Args:
            x: As in `fit`.
            batch_size: Refused; the Trainer's global_batch_size sets it.
            verbose: As in `fit`.
            steps: Number of global batches to predict.

        Returns:
            Arrays of shape (examples, ...) in the structure of the model's outputs; a tf.RaggedTensor for an output
            whose inner dimensions differ between batches.

        Raises:
            UsageError: If an argument or the data cannot work.
            ReplicaError: If the ranks disagree on the model, the data or the arguments.
            EngineError: If Horovod stopped because another rank failed or did not arrive in time.
        """
        refuse_batch_size("batch_size", batch_size, self.strategy.workers)
        source = self._source((x, None, None), steps)
        with in_job(self.rank, self._saved):
            self._agree(source, {}, "prediction")
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(self._symbolic_data(source))
            if self._predicting is None:
                self._predicting = self.strategy.prepare_prediction(self.model, inputs)
            shown = resolve_verbose(verbose, self.rank)
            with showing(shown, self.rank) as show:
                progress = Progress(shown, show, "Prediction", source.steps_per_epoch)
                return predict(self._predicting, self.strategy, source, progress, self._probe)

    def save(self, filepath: str | Path) -> None:
        """Write the whole model to a .keras file, with the optimizer's state if the model has been trained.

        Every rank must call this. Plain Keras loads the file, also where hvdtrain is not installed.

        Args:
            filepath: Path that ends in .keras.

        Raises:
            UsageError: If the path does not end in .keras; on all ranks, if rank 0 cannot write the file.
            EngineError: If Horovod stopped because another rank failed or did not arrive in time.
        """
        with in_job(self.rank, self._saved):
            self.strategy.save(self.model, keras_file(filepath, "save"))

    def load(self, filepath: str | Path) -> None:
        """Load the state of the model and the optimizer from a .keras file.

        Every rank must call this; rank 0 reads the file. Plain Keras may have written it, or a Trainer with any number
        of ranks, strategy or layout. If the file holds no optimizer state, the optimizer is left unchanged. The model
        must know the shapes of its inputs. A .keras file holds no random seeds (dropout); they are left unchanged.

        Args:
            filepath: Path that ends in .keras.

        Raises:
            UsageError: If the file does not exist, or does not fit; the message names the first variable and both
                shapes.
            EngineError: If Horovod stopped because another rank failed or did not arrive in time.
        """
        with in_job(self.rank, self._saved):
            self.strategy.load(self.model, keras_file(filepath, "load"))

    def _distribute(self, optimizer: Any, scaling: str) -> Any:
        """Return the user's optimizer with its learning rate scaled, distributed by the strategy."""
        if self._warmup_epochs:
            require_settable(optimizer, "warmup_epochs")
        refuse_several(inner_of(optimizer))
        begin = 0.0 if scaling == "none" else float(optimizer.learning_rate)
        scale_learning_rate(optimizer, scaling, self.strategy.workers)
        if self._on_nan == "skip":
            optimizer = skipping(optimizer, self.model.dtype_policy.name)
        distributed = self.strategy.distribute(optimizer)
        self._ramps.append(Ramp(distributed, begin, float(distributed.learning_rate)))
        return distributed

    def _source(
        self,
        data: tuple[Any, Any, Any],
        steps: int | None,
        sharded: bool = False,
        *,
        shuffle: bool = False,
        class_weight: Any = None,
        training: bool = False,
    ) -> Source:
        """Return the source that reads `data`: x, y and sample_weight."""
        return training_source(
            data,
            self.strategy,
            self.model,
            self.rank.size,
            sharded,
            global_batch_size=self.global_batch_size,
            shuffle=shuffle,
            seed=self.seed,
            steps_per_epoch=steps,
            class_weight=class_weight,
            training=training,
        )

    def _agree(
        self, source: Source, facts: dict[str, Any], what: str, validation: Source | None = None
    ) -> None:
        """Compare what the ranks are about to do, before a collective could wait for a rank that does not come."""
        if keeps_rows(self.model):
            inputs = self.strategy.inputs(self.model)
            check_fixed_batch(inputs, source, self.global_batch_size, self.strategy.workers)
        require_equal(source_facts(source, validation) | self._config | facts, what)
        require_alike(samples_of(source, validation), what)

    def _prepare(
        self, source: Source, what: str, facts: dict[str, Any], validation: Source | None = None
    ) -> Loop:
        """Compare model and data over the ranks, build the model's variables if needed, and return the loop."""
        compiled = compiled_as(self.model)
        anew = self._trained is not None and compiled.trains_otherwise(self._trained, what)
        self._agree(source, facts | {"the model is compiled anew": anew}, what, validation)
        if self.steps is not None:
            if anew:
                raise UsageError(
                    "The model was compiled again, or layers were frozen or unfrozen, after this "
                    "Trainer started training: create a new one, Trainer(trainer.model, "
                    "optimizer=..., loss=...), and train with that"
                )
        else:
            data = self._symbolic_data(source)
            self.steps = self._predicting = self.strategy.prepare(self.model, data, what)
            self._trained = compiled_as(self.model)
        return Loop(
            self.model,
            self.strategy,
            self.steps,
            self.rank,
            guard=self._guard,
            probe=self._probe,
            steps_per_execution=self._steps_per_execution,
            record=FitRecord(self._run_dir, self.model, self.rank, self._config, self._tracking),
            saved=self._saved,
            losses=loss_watch(
                self._on_nan, source, self.strategy.part, self._run_dir, self.model, self._saved
            ),
        )

    def _symbolic_data(self, source: Source) -> Any:
        # From the source's signature, as an iterator's first batch can be read only once.
        count = self.strategy.part.count
        return symbolic_data(source.element, max(1, self.global_batch_size // count))
