"""Checks and converts the arguments of the Trainer: the model, the arguments of compile, data and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import (
    KnownSource,
    ShardedSource,
    Source,
    Spec,
    is_batched,
    make_source,
    split,
    validation_split,
)
from hvdtrain.data.structures import is_bare
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.file_writes import prepare_saving
from hvdtrain.keras_internals.models import (
    compares_with_labels,
    compile_config,
    optimizers_of,
    overridden,
)
from hvdtrain.keras_internals.optimizers import inner_of, refuse_several
from hvdtrain.strategies.strategy import ModelSource, Strategy


def make_model(
    model: ModelSource, precision: str | None, build: Callable[[ModelSource], keras.Model]
) -> keras.Model:
    """Return the model that `build` makes of `model`, with the dtype policy `precision`.

    Args:
        model: A keras.Model, or a function that builds one.
        precision: Name of a Keras dtype policy, set before a function is called; None: the current one.
        build: The strategy's function that returns the model to train.

    Raises:
        UsageError: If `model` is neither, the policy is unknown, or an instance was built with another policy.
    """
    if isinstance(model, keras.Model):
        if precision is not None and model.dtype_policy.name != precision:
            raise UsageError(
                f"precision={precision!r}, but the model was built with {model.dtype_policy.name!r}: pass a function "
                "that builds the model, or call keras.config.set_dtype_policy first"
            )
        return build(model)
    if not callable(model):
        raise UsageError(
            f"model: pass a keras.Model or a function that builds one, not {type(model).__name__}"
        )
    if precision is not None:
        try:
            keras.config.set_dtype_policy(precision)
        except ValueError as error:
            raise UsageError(f"precision={precision!r}: {error}") from error
    built = build(model)
    if not isinstance(built, keras.Model):
        raise UsageError(f"model: the function returned {type(built).__name__}, not a keras.Model")
    return built


def compile_model(
    model: keras.Model,
    strategy: Strategy,
    prepare: Callable[[Any], Any],
    given: dict[str, Any],
    *,
    jit_compile: bool,
    run_eagerly: bool,
) -> None:
    """Compile `model`, with optimizers that `strategy` distributes.

    Args:
        model: Model that `make_model` returned.
        strategy: Strategy that runs the training.
        prepare: Function that makes the optimizer to train with from the user's.
        given: The Trainer's optimizer, loss, metrics, weighted_metrics and loss_weights; None where left out.
        jit_compile: Whether to compile steps with XLA.
        run_eagerly: Whether to run steps without tf.function.

    Raises:
        UsageError: If these arguments do not fit the model or the strategy.
    """
    own = overridden(model, "make_train_function", "make_test_function", "make_predict_function")
    if own is not None:
        raise UsageError(
            f"{type(model).__name__} overrides {own}, which a Trainer does not call: override "
            f"{own.replace('make_', '').replace('function', 'step')} instead, or train with "
            "hvdtrain.keras and model.fit"
        )
    prepare_saving()
    run_eagerly = run_eagerly or model.run_eagerly
    if overridden(model, "compile"):
        _require_own_compile(model, given)
        with strategy.scope():
            model.optimizer = model.optimizer and prepare(model.optimizer)
        model.jit_compile, model.run_eagerly = jit_compile, run_eagerly
    else:
        compiled = compile_arguments(model, given)
        optimizer = prepare(compiled["optimizer"])
        with strategy.scope():
            model.compile(
                **compiled | {"optimizer": optimizer},
                jit_compile=jit_compile,
                run_eagerly=run_eagerly,
            )
    for other in optimizers_of(model):
        if other is model.optimizer:
            continue
        if not strategy.several_optimizers:
            raise UsageError(
                f"{type(model).__name__} trains with several optimizers, which strategy "
                f"{strategy.name!r}, layout and shard_optimizer do not support: leave these out"
            )
        prepare(other)


def _require_own_compile(model: keras.Model, given: dict[str, Any]) -> None:
    """Raise UsageError unless a model that overrides `compile` was compiled, and is given no arguments for it."""
    name = type(model).__name__
    if not model.compiled:
        raise UsageError(
            f"{name} overrides compile with its own arguments: call compile before Trainer, or in the "
            "function that builds the model"
        )
    for argument, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name} overrides compile, and was compiled with its own {argument}: leave {argument} out "
                "here"
            )


def compile_arguments(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for model.compile: for those that are None in `given`, those of the compiled model.

    Raises:
        UsageError: If Keras has no such optimizer, or the optimizer holds several.
    """
    found = given
    if model.compiled:
        before = compile_config(model) | {"optimizer": model.optimizer}
        found = {name: before.get(name) if v is None else v for name, v in given.items()}
    wanted = found["optimizer"]
    try:
        optimizer = keras.optimizers.get("rmsprop" if wanted is None else wanted)
    except ValueError as error:
        raise UsageError(f"optimizer={wanted!r}: {error}") from error
    refuse_several(inner_of(optimizer))
    return found | {"optimizer": optimizer}


def refuse_batch_size(name: str, value: Any, workers: int) -> None:
    """Raise UsageError if the argument `name` (batch_size or validation_batch_size) was given."""
    if value is not None:
        raise UsageError(
            f"{name}={value!r}: the batch size is set once, for all workers together: Trainer(..., "
            f"global_batch_size={value}), or {value} for each of the {workers} workers: "
            f"global_batch_size={value} * {workers}. Leave {name} out here"
        )


def as_callbacks(given: Any) -> list[keras.callbacks.Callback]:
    """Return the user's callbacks, one or a nested structure of them, as a flat list.

    Raises:
        UsageError: If there is anything but Keras callbacks in it.
    """
    found = keras.tree.flatten(given or [])
    for one in found:
        if isinstance(one, type):
            raise UsageError(f"callbacks: pass an object, {one.__name__}(...), not the class")
        if not hasattr(one, "set_model"):
            raise UsageError(
                f"callbacks: expected a keras.callbacks.Callback, not {type(one).__name__}"
            )
    return found


def require_labels(model: keras.Model, *sources: Source | None) -> None:
    """Raise UsageError for data without labels, if Keras's own step would pass them to the loss of compile."""
    if not compares_with_labels(model):
        return
    for source in sources:
        if source is not None and (is_bare(source.element) or len(source.element) < 2):
            raise UsageError(
                "The data has no labels, which the model's loss needs: pass y, or data of (x, y)"
            )


def check_epochs(epochs: int, initial_epoch: int, value: int | Collection[int]) -> None:
    """Check the arguments of fit about epochs.

    Args:
        epochs: Number of the last epoch, from 1; 0 trains nothing.
        initial_epoch: Index of the first epoch, from 0.
        value: The argument validation_freq.

    Raises:
        UsageError: If a number is not an integer or too small, or validation_freq is neither a number nor a list of
            them.
    """
    require_integer("epochs", epochs, 0)
    require_integer("initial_epoch", initial_epoch, 0)
    if isinstance(value, Integral):
        require_integer("validation_freq", value)
    elif not isinstance(value, Collection) or not all(
        isinstance(epoch, Integral) for epoch in value
    ):
        raise UsageError(
            f"validation_freq={value!r}: pass the number of epochs between evaluations, or a list of epochs after "
            "which to evaluate, such as [1, 3]"
        )


def check_split(validation_data: Any, sharded: bool) -> None:
    """Raise UsageError if `validation_split` is given with arguments that it does not go with."""
    if validation_data is not None:
        raise UsageError("Pass validation_data or validation_split, not both")
    if sharded:
        raise UsageError(
            "validation_split with sharded=True would hold back other examples on each worker, while validation "
            "divides data that all have in common: pass validation_data, the same on every worker"
        )


def split_arrays(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[Any, Any]:
    """Return ((x, y, sample_weight), validation data): the last `fraction` of the examples, before shuffling."""
    train, validation = validation_split(x, y, sample_weight, fraction)
    return (*train, None, None)[:3], validation


def symbolic_data(element: Any, examples: int) -> Any:
    """Return `examples` examples like `element` (see `Source.element`) as Keras's symbolic tensors."""
    if isinstance(element, Spec):
        text = element.dtype.startswith(("str", "bytes", "object"))
        return keras.KerasTensor((examples, *element.shape), "string" if text else element.dtype)
    if isinstance(element, dict):
        return {key: symbolic_data(item, examples) for key, item in element.items()}
    items = [symbolic_data(item, examples) for item in element]
    return items if isinstance(element, list) else tuple(items)


def check_fixed_batch(inputs: Sequence[Any], source: Source, batch_size: int, workers: int) -> None:
    """Check that a model with a fixed batch size, such as a stateful RNN, gets shares of that size.

    Args:
        inputs: Symbolic inputs of the model.
        source: Data to read.
        batch_size: Number of examples per step, over all workers.
        workers: Number of workers.

    Raises:
        UsageError: If a share, or the last batch of the data, has another size.
    """
    for fixed in {tensor.shape[0] for tensor in inputs} - {None}:
        if fixed * workers != batch_size:
            raise UsageError(
                f"The model's inputs have a batch size of {fixed} (batch_shape, for a stateful RNN): that is each "
                f"worker's share of a step, and global_batch_size={batch_size} on {workers} workers is not {workers} * "
                f"{fixed}. Use global_batch_size={fixed * workers}, or build the model with batch_shape="
                f"({batch_size} // hvdtrain.init().size, ...)"
            )
        if source.examples is not None and source.examples % batch_size:
            raise UsageError(
                f"The model's inputs have a batch size of {fixed} on each worker, and "
                f"{source.examples} examples do not divide evenly into batches of {batch_size}: "
                f"leave {source.examples % batch_size} out"
            )


@dataclass(frozen=True)
class Compiled:
    """The parts of a model for which its steps were compiled.

    Attributes:
        optimizers: Optimizers that train it.
        compiled: Losses and metrics of compile.
        trained: Ids of the variables that they train.
    """

    optimizers: list[Any]
    compiled: list[Any]
    trained: list[int]

    def trains_otherwise(self, before: Compiled, what: str) -> bool:
        """Whether steps compiled for `before` no longer fit.

        Frozen layers make a difference only if `what` is "training".
        """
        frozen = what == "training" and self.trained != before.trained
        anew = (self.optimizers, self.compiled) != (before.optimizers, before.compiled)
        return frozen or anew


def compiled_as(model: keras.Model) -> Compiled:
    """Return what steps of `model` would be compiled for now."""
    compiled = [getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics")]
    return Compiled(optimizers_of(model), compiled, [id(v) for v in model.trainable_variables])


def one_or_all(values: list[Any]) -> Any:
    """Return the only one of `values`, or all of them; most models have one optimizer."""
    return values[0] if len(values) == 1 else values


def source_facts(source: Source, validation: Source | None = None) -> dict[str, Any]:
    """Return the facts about its data that a rank compares with the others before it starts."""
    facts = {
        "the number of steps in an epoch": source.steps_per_epoch,
        "the number of examples": source.examples,
        "the shape and dtype of an example": source.element,
    }
    if validation is not None:
        facts |= {f"validation {key}": value for key, value in source_facts(validation).items()}
    return facts


def samples_of(source: Source, validation: Source | None = None) -> dict[str, list[float | str]]:
    """Return samples of the data that a rank compares with the others before it starts, by name.

    Without those of streams, which are compared batch by batch, while they are read.
    """
    samples = source.sample() if isinstance(source, KnownSource) else {}
    if validation is not None:
        samples |= {f"validation {name}": one for name, one in samples_of(validation).items()}
    return samples


def keras_file(filepath: str | Path, what: str) -> Path:
    """Return the path of a .keras file.

    Args:
        filepath: Path that the user gave.
        what: Name of the Trainer's method, for the message.

    Raises:
        UsageError: If the path does not end in .keras.
    """
    path = Path(filepath)
    if path.suffix != ".keras":
        raise UsageError(f"{what}: {filepath}: pass a file name that ends in .keras")
    return path


def training_source(
    data: tuple[Any, Any, Any],
    strategy: Strategy,
    model: keras.Model,
    ranks: int,
    sharded: bool,
    *,
    global_batch_size: int,
    **reading: Any,
) -> Source:
    """Return the source that reads a Trainer's training data.

    Args:
        data: x, y and sample_weight.
        strategy: Strategy that runs the training.
        model: Model to train.
        ranks: Number of ranks in the job.
        sharded: Whether `data` holds only this rank's examples.
        global_batch_size: Number of examples per step, over all workers.
        reading: Further arguments of `make_source`.

    Raises:
        UsageError: If `sharded` and a rank does not train on a share of its own, or as in `make_source`.
    """
    x, y, weight = data
    part = strategy.part
    if sharded and part.count != ranks:
        raise UsageError(
            "sharded=True needs every rank to hold the whole model and read its own examples, "
            f"which this layout or strategy does not allow ({strategy.name})"
        )
    batched = None
    if isinstance(x, tf.data.Dataset):
        inputs = strategy.inputs(model)
        batched = is_batched(x, [len(i.shape) for i in inputs] or None)
    begin, end = split(global_batch_size, part.index, part.count)
    source = make_source(
        x,
        y,
        weight,
        global_batch_size=end - begin if sharded else global_batch_size,
        batched=batched,
        threads=tf.config.threading.get_intra_op_parallelism_threads() or None,
        **reading,
    )
    return ShardedSource(source, reading["steps_per_epoch"]) if sharded else source
