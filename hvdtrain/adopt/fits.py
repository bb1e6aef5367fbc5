"""Leads keras.Model.fit, evaluate and predict of a script to a Trainer, which divides the batches over the ranks.

What a Trainer does not take, every rank trains as plain Keras does, on whole batches: no faster than one process, and
with the same result. Afterwards all ranks take the state of rank 0.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer as BaseTrainer

from hvdtrain.adopt.batches import KERAS_DEFAULT, batch_examples, is_generator
from hvdtrain.adopt.differences import differences_by_rounding, known_differences
from hvdtrain.adopt.evaluations import Evaluation, depends_on_batches
from hvdtrain.adopt.fit_writes import written_paths
from hvdtrain.adopt.frozen_layers import Flags, trained_as, trained_layers
from hvdtrain.adopt.growth import Growth
from hvdtrain.adopt.keras_order import KerasItems, ScriptsSeed, in_keras_order
from hvdtrain.adopt.notes import NOT_GROWN, WHOLE, Notes
from hvdtrain.adopt.own_draws import own_draws
from hvdtrain.adopt.private_folder import PrivateFolder
from hvdtrain.adopt.replayed import Replayed
from hvdtrain.adopt.same_way import SameWay
from hvdtrain.adopt.shared_predictions import own_rows, predict_together
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.replicas import check_replicas, copy_variables
from hvdtrain.data.arrays import convert, is_arrays, unpack
from hvdtrain.data.structures import count_examples
from hvdtrain.errors import ReplicaError, UsageError
from hvdtrain.keras.fit import prepare_fit
from hvdtrain.keras.optimizer import undistribute
from hvdtrain.keras.sync_batch_norm import synchronized
from hvdtrain.keras.writers import on_this_rank
from hvdtrain.keras_internals.corrections import replaced
from hvdtrain.keras_internals.models import (
    compile_config,
    optimizers_of,
    overridden,
    refresh_constants,
)
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed
from hvdtrain.keras_internals.variables import (
    optimizer_variables,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
)
from hvdtrain.runtime import Rank
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.trainer import Trainer
from hvdtrain.trainer.setup import split_arrays

_NAME = "_hvdtrain_adopted"
"""Entry of a model's __dict__: its Trainer."""
_OF_TRAINER = (
    "epochs",
    "validation_freq",
    "steps_per_epoch",
    "class_weight",
    "initial_epoch",
    "verbose",
)
"""Arguments of fit that a Trainer takes as they are."""


class _ScriptsSeeds(HorovodStrategy):
    """Leaves the seeds to the script."""

    def start(self, seed: int | None) -> Rank:
        del seed
        return super().start(None)


@dataclass(frozen=True)
class _Adopted:
    """What the ranks do with a model until it is compiled again.

    Attributes:
        trainer: Trainer that shares its batches; None if every rank trains on whole ones.
        batch: Number of examples in a batch.
        trained: The layers that it trains.
        reason: Why there is no Trainer.
    """

    trainer: Trainer | None
    batch: int = 0
    trained: Flags = field(default_factory=list)
    reason: str = ""


class AdoptedFits:
    """What a script's fits have become so far.

    Args:
        rank: This process's place in the job.
        notes: Messages to the user.
        folder: The folder that this rank works in.
        way: Whether the ranks make the same calls.
        seed: Whether the script has set a seed.
        growth: How the ranks grow the batches of the script.

    Attributes:
        running: Whether a fit or an evaluation is running; one inside it, from a callback, is Keras's own, as not all
            ranks may run the callback.
    """

    def __init__(
        self,
        rank: Rank,
        notes: Notes,
        folder: PrivateFolder,
        way: SameWay,
        seed: ScriptsSeed,
        growth: Growth,
    ) -> None:
        self.running = False
        self.way = way
        self._growth = growth
        self._seed = seed
        self._rank = rank
        self._notes = notes
        self._folder = folder
        self._fits = itertools.count()

    def fit(
        self, original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Train `model` like keras.Model.fit, sharing each batch among the ranks if that gives the same result.

        Raises:
            UsageError: The learning rate is to grow, and is a LearningRateSchedule.
        """
        given = _arguments(original, model, *args, **kwargs)
        if self._is_kerass(given) or not model.compiled:
            return original(model, *args, **kwargs)
        self._growth.require_settable(model)
        seed = next(self._fits)
        with self._alone():
            before, files = _Before(model), self._folder.before_fit()
            paths = written_paths(keras.tree.flatten(given["callbacks"] or []))
            if not self.way.joins("fit"):
                before.restore()
                return original(model, *args, **kwargs)
            adopted = vars(model).get(_NAME)
            try:
                if adopted is not None and adopted.reason:
                    raise UsageError(adopted.reason)
                history = self._shared(model, given, seed, before)
            except (UsageError, ReplicaError) as error:
                if before.has_trained():
                    raise
                before.restore()
                reason = _reason(error)
                how = NOT_GROWN if self._growth.is_asked_for else WHOLE
                self._notes.tell("fit", f"{how}. The reason: {reason}")
                history = self._by_all(original, model, given)
                # Not before: what plain Keras refuses, too, says nothing of the next fit.
                vars(model)[_NAME] = _Adopted(None, reason=reason)
            self._folder.after_fit(files, paths)
        return history

    def evaluate(
        self, original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate `model` like keras.Model.evaluate, on all ranks together if they have trained it together."""
        given = _arguments(original, model, *args, **kwargs)
        adopted = vars(model).get(_NAME)
        if self._is_kerass(given) or adopted is None:
            return original(model, *args, **kwargs)
        return self._together(
            "evaluate",
            lambda: self._evaluated(model, given, adopted),
            lambda: original(model, *args, **kwargs),
        )

    def predict(
        self, original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Predict like keras.Model.predict, on all ranks together if they have trained the model."""
        given = _arguments(original, model, *args, **kwargs)
        if self._is_kerass(given) or _NAME not in vars(model) or given["steps"]:
            return original(model, *args, **kwargs)
        named = {name: value for name, value in given.items() if name != "self"}

        def shared() -> Any:
            if given["callbacks"]:
                raise UsageError("callbacks see all of its batches")
            x = given["x"]
            rows = own_rows(model, x, given["batch_size"] or KERAS_DEFAULT, self._rank)
            self._join("predict", model)
            return predict_together(lambda: original(model, **named | {"x": rows}), model, x)

        return self._together("predict", shared, lambda: original(model, *args, **kwargs))

    def _join(self, what: str, model: keras.Model) -> None:
        """Raise UsageError if not all ranks make this call, and ReplicaError if their models differ. A collective."""
        if not self.way.joins(what):
            raise UsageError("rank 0 is alone")
        check_replicas(variables=model.variables)

    def _together(self, what: str, shared: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        """Return the result of `shared`; that of `whole`, on each rank alike, if it cannot be shared."""
        with self._alone():
            try:
                result = shared()
            except (UsageError, ReplicaError) as error:
                differ = isinstance(error, ReplicaError)
                tell = self._notes.tell if differ else self._notes.explain
                tell(what, f"each worker computes all of it: {_reason(error)}")
                return whole()
            self._notes.explain(what, f"{self._rank.size} workers share the batches")
            return result

    def _evaluated(self, model: keras.Model, given: dict[str, Any], adopted: _Adopted) -> Any:
        """Evaluate with the model's Trainer.

        Raises:
            UsageError: There is none, or it would find something else than Keras.
            ReplicaError: The ranks have different data or weights.
        """
        if adopted.trainer is None:
            raise UsageError("the workers have trained it on whole batches")
        x, callbacks = as_inputs(given["x"]), given["callbacks"]
        if is_generator(x):
            raise UsageError("a generator can be read only once")
        arrays = is_arrays(x)
        data = unpack(x, given["y"], given["sample_weight"]) if arrays else x
        found = Evaluation.of(data, given["batch_size"], given["steps"])
        if arrays and count_examples(convert(found.data), "the data") <= found.batch:
            raise UsageError("there is no more than one batch")
        cause = "what callbacks see" if callbacks else depends_on_batches(model)
        if found.batch != adopted.batch and cause:
            raise UsageError(f"{cause} may depend on the size of the batches")
        self._join("evaluate", model)
        names = ("verbose", "callbacks", "return_dict")
        with own_draws(model, adopted.trainer, self._rank):
            return adopted.trainer.evaluate(found.data, **{name: given[name] for name in names})

    def _shared(self, model: keras.Model, given: dict[str, Any], seed: int, before: _Before) -> Any:
        """Train with a Trainer. If data can be read only once, `given` keeps what was read before the training.

        Raises:
            UsageError: The Trainer does not take the model, the data or an argument.
            ReplicaError: The ranks have different data.
        """
        train = (as_inputs(given["x"]), given["y"], given["sample_weight"])
        held_out = given["validation_data"]
        if given["validation_split"] and held_out is None:
            train, held_out = split_arrays(*train, given["validation_split"])
        steps, at_once = given["steps_per_epoch"], model.steps_per_execution
        if steps and steps % at_once:
            raise UsageError(
                f"Keras takes {at_once} steps at once (steps_per_execution), and so more than steps_per_epoch, {steps}"
            )
        own, data = batch_examples(train[0], given["batch_size"], given["steps_per_epoch"])
        size = self._growth.examples(own, self._rank.size)
        if is_generator(data):
            data = Replayed(data, before.has_trained)
            given["x"] = data.again()
        trainer, trained = self._trainer_of(model, size)
        trainer.seed = seed
        taken = {name: given[name] for name in _OF_TRAINER}
        wanted = given["validation_batch_size"] or given["batch_size"]
        validation = Evaluation.of(held_out, wanted, given["validation_steps"])
        notes = known_differences(model, self._seed.is_set)
        train, shuffle = (data, *train[1:]), given["shuffle"]
        in_order = bool(shuffle and self._seed.is_set)
        if in_order and is_arrays(data):
            train, shuffle = (in_keras_order(train, own, shuffle), None, None), False
        elif isinstance(data, keras.utils.PyDataset) and size == own:
            train, shuffle = (KerasItems(data, in_order), *train[1:]), shuffle and not in_order

        def begin(logs: Any) -> None:
            unlike = validation.unlike(model, size) if size == own else ""
            how = f"{self._rank.size} workers share each batch of {size}"
            if size != own:
                how += f" in place of {own}"
            self._notes.tell("fit", how + scaled.scale() + notes + unlike)

        def after_epoch(epoch: int, logs: Any) -> None:
            if epoch == given["initial_epoch"] and (found := differences_by_rounding(model)):
                self._notes.tell("fit", found)

        scaled = self._growth.rates(model, self._rank.size)
        tells = keras.callbacks.LambdaCallback(on_train_begin=begin, on_epoch_end=after_epoch)
        taken["callbacks"] = [tells, *keras.tree.flatten(given["callbacks"] or [])]
        drawing = own_draws(model, trainer, self._rank)
        with synchronized(model), trained_as(trained), scaled, drawing:
            return trainer.fit(
                *train, validation_data=validation.data, shuffle=bool(shuffle), **taken
            )

    def _trainer_of(self, model: keras.Model, batch: int) -> tuple[Trainer, Flags]:
        """Return the model's Trainer, and the layers that it trains.

        It is a new one if the model was compiled again, or the batches have another size.
        """
        adopted = vars(model).get(_NAME)
        if adopted is not None and adopted.trainer is not None and adopted.batch == batch:
            return adopted.trainer, adopted.trained
        trainer = Trainer(
            model,
            global_batch_size=batch,
            strategy=_ScriptsSeeds(),
            jit_compile=bool(model.jit_compile),
            run_eagerly=model.run_eagerly,
            steps_per_execution=model.steps_per_execution,
        )
        if model.run_eagerly:
            trained: Flags = []  # Keras looks at them in each step.
        else:
            trained = trained_layers(model) if adopted is None else adopted.trained
        vars(model)[_NAME] = _Adopted(trainer, batch, trained)
        return trainer, trained

    def _is_kerass(self, given: dict[str, Any]) -> bool:
        """Whether a call is to be left to Keras: the ranks might not make it in the same order."""
        in_thread = threading.current_thread() is not threading.main_thread()
        is_inner = isinstance(given["callbacks"], keras.callbacks.CallbackList)
        return self.running or in_thread or is_inner

    def _by_all(
        self, original: Callable[..., Any], model: keras.Model, given: dict[str, Any]
    ) -> Any:
        """Train on all ranks alike, and take rank 0's result."""
        callbacks = keras.tree.flatten(given["callbacks"] or [])
        given = given | {"callbacks": on_this_rank(callbacks, self._rank.is_first)}
        given.pop("self")
        history = original(model, **given)
        found = [*model.variables, *optimizer_variables(model), *untracked_variables(model)]
        copy_variables(unique(found), 0, ALL_RANKS)
        refresh_constants(model)
        history.history = ALL_RANKS.exchange(_plain(history.history), "adopted_history")[0]
        return history

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False


class _Before:
    """A model before a Trainer prepared it, to be trained by Keras after all."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._jit, self._eagerly = model.jit_compile, model.run_eagerly
        self._steps = self._count()
        self._seeds = [(one, one.numpy()) for one in map(tf_variable, seed_variables(model))]

    def has_trained(self) -> bool:
        """Whether a step was made since."""
        return self._count() != self._steps

    def restore(self) -> None:
        """Undo what the Trainer changed."""
        model = self._model
        for variable, value in self._seeds:
            variable.assign(value)
        distributed = [one for one in optimizers_of(model) if is_distributed(one)]
        if not distributed:
            return
        for optimizer in distributed:
            undistribute(optimizer)
        if overridden(model, "compile"):
            model.jit_compile, model.run_eagerly = self._jit, self._eagerly
        else:
            given = compile_config(model) | {"optimizer": model.optimizer}
            model.compile(**given | {"jit_compile": self._jit, "run_eagerly": self._eagerly})

    def _count(self) -> int:
        return sum(int(inner_of(one).iterations.numpy()) for one in optimizers_of(self._model))


def as_inputs(x: Any) -> Any:
    """Return the data of Keras's `x` for a Trainer, for which a tuple is (x, y)."""
    return list(x) if isinstance(x, tuple) else x


@contextlib.contextmanager
def adopted_fits(
    rank: Rank,
    notes: Notes,
    folder: PrivateFolder,
    way: SameWay,
    growth: Growth,
) -> Iterator[AdoptedFits]:
    """Lead the fits, evaluations and predictions of this block to Trainers."""
    prepare_fit()  # Before fit is replaced here: it would show a Trainer callbacks of its own.
    seed = ScriptsSeed()
    fits = AdoptedFits(rank, notes, folder, way, seed, growth)

    def of_rank(what: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            way.require_ranks_process(what)
            return replacement(*args, **kwargs)

        return call

    with (
        seed.watched(),
        replaced(keras.Model, "fit", of_rank("fit", fits.fit)),
        replaced(keras.Model, "evaluate", of_rank("evaluate", fits.evaluate)),
        replaced(keras.Model, "predict", of_rank("predict", fits.predict)),
        # Of the class that defines it, as Keras looks whether a model's class overrides it.
        replaced(BaseTrainer, "compile", _compiled_anew),
        replaced(keras.Model, "quantize", _compiled_anew),
        replaced(keras.Model, "make_train_function", _traced_anew),
    ):
        yield fits


def _compiled_anew(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    vars(model).pop(_NAME, None)
    return original(model, *args, **kwargs)


def _traced_anew(original: Callable[..., Any], model: keras.Model, force: bool = False) -> Any:
    if force:
        vars(model).pop(_NAME, None)
    return original(model, force)


def _arguments(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with those left out."""
    call = inspect.signature(method).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _reason(error: Exception) -> str:
    """Return why a Trainer does not train; what to do about it is not for a script that knows no Trainer."""
    if isinstance(error, ReplicaError):
        usual = "random numbers without a seed, or new files in an order that was not sorted?"
        return f"{str(error).partition('. ')[0]} ({usual})"
    return str(error)


def _plain(history: dict[str, list[Any]]) -> dict[str, list[float]]:
    return {name: [float(value) for value in values] for name, values in history.items()}
