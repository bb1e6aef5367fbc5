"""Probe: test whether the step of a batch is the sum of the steps of its parts.

Training on several workers relies on it: each computes the gradients of its share, and they are summed. It holds for
losses that are means over examples, and for those that losses.py makes exact. It does not hold for a loss that compares
examples with each other, a sum in a train_step, or a layer that mixes the examples of a batch. Instead of a list of
such cases, each rank runs the model's own train_step on a few of its examples before the first step, whole and in
two uneven parts, and compares the gradients without applying them. All assignments are undone.

Batch normalization and dropout differ by design (batch_dependence.py) and are off during the probe. A step that draws
other random numbers each time cannot be judged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.step_context import Step, in_step, in_trial
from hvdtrain.keras_internals.compiled_losses import outputs_read_as_rows
from hvdtrain.keras_internals.metric_calls import is_known_to_add_up, metrics_of
from hvdtrain.keras_internals.models import (
    numbers_kept,
    optimizers_of,
    own_non_trainable_variables,
    trains_by_keras,
)
from hvdtrain.keras_internals.optimizers import gradients_taken
from hvdtrain.keras_internals.variables import (
    global_seed_variable,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
    variable_name,
    without,
)
from hvdtrain.strategies import batch_dependence
from hvdtrain.strategies.stateful_updates import Kinds, kinds_of_growth

EXAMPLES = 5
"""Largest number of examples that the probe uses, in parts of 3 and 2."""

TOLERANCES = {"float16": 3e-2, "bfloat16": 2e-1}
"""Relative tolerance by compute dtype (11 and 8 significant bits, about ten roundings deep); 1e-3 for others. A wrong
rule is off by about the ratio of the parts' sizes, 0.2 or more."""

NEAR_A_KINK = 0.1
"""Gap up to which the probe is repeated a little aside of the examples. A GPU computes batches of other sizes by other
algorithms, so that rounding may decide whether a ReLU passes a value near 0: 5e-3 was seen in a ResNet-50."""

DRAWS = "its gradients differ each time it runs on the same examples (random numbers?)"
"""Reason why a step with random gradients cannot be judged."""

STEPS = 16
"""Most steps to wait for one that applies gradients: a step may accumulate them, or train several models in turn."""

WAITS = f"its first {STEPS} steps apply no gradients"
"""Reason why a step that waits for longer cannot be judged."""

Result = TypeVar("Result")
Marks = dict[str, np.ndarray]
"""For each variable's name, an array of shape (3,): a projection of its gradient to one number, which adds up over
parts; the norm of the gradient; the number of its slices, 0 if it is dense."""


@dataclass(frozen=True)
class Verdict:
    """The findings of one rank.

    Attributes:
        as_mean: Whether the gradients of the parts, each times its share, add up to those of the whole; None: unknown.
        as_sum: Whether they add up without shares.
        worst: Name of the variable whose gradient differs most.
        gap: Relative difference of that gradient.
        once: Indices in the model's trainable variables of those whose sparse gradients have as many slices for the
            whole as for a part.
        summed, averaged, unclear: Indices in `state_of` of the variables that grow by the sum over the parts, by their
            mean, and by another rule.
        counted: Indices in `counts_of` of the variables that grow by the sum over the parts.
        why_not: Reason why the step could not be judged.
    """

    as_mean: bool | None = None
    as_sum: bool = False
    worst: str = ""
    gap: float = 0.0
    once: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    unclear: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    why_not: str = ""


def probe(model: keras.Model, data: Any, step: Step) -> Verdict:
    """Test whether the gradients of the parts of `data` add up to those of `data`. No communication.

    Args:
        model: Built and compiled model with exact losses (see losses.make_exact).
        data: Argument of train_step: tensors with at least 2 examples along the leading dimension.
        step: How a rank's part is weighted.
    """
    size = int(tf.nest.flatten(data)[0].shape[0])
    if size == outputs_read_as_rows(model, data) > 2:
        return probe(model, _rows(data, 0, size - 1), step)
    parts, shares = _in_parts(model, data)
    verdict, moves = _verdict(model, data, parts, shares, step)
    if verdict.as_mean is False and not verdict.as_sum and verdict.gap < NEAR_A_KINK:
        aside = _aside(data)
        others, _ = _in_parts(model, aside)
        again, _ = _verdict(model, aside, others, shares, step)
        verdict = again if again.as_mean else verdict
    kinds = _kinds(model, data, parts, shares) if moves else Kinds()
    own = len(state_of(model))
    return replace(
        verdict,
        summed=tuple(place for place in kinds.summed if place < own),
        averaged=tuple(place for place in kinds.averaged if place < own),
        unclear=tuple(place for place in kinds.unclear if place < own),
        counted=tuple(place - own for place in kinds.summed if place >= own),
    )


def kind_of_loss(model: keras.Model, data: Any, step: Step) -> str:
    """Test how the model's own compute_loss combines over parts of a batch. No communication.

    Args:
        model, data, step: As in `probe`.

    Returns:
        "mean" over examples, "sum", or "other"; "" if it cannot be tested.
    """

    def loss_of(part: Any, own: Step | None) -> float:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(part)
        with in_step(own), in_trial():
            return float(model._compute_loss(x, y, model(x, training=False), weights, False))

    parts, shares = _in_parts(model, data)
    try:
        with unchanged(model), _repeatable(model):
            whole, again = loss_of(data, None), loss_of(data, None)
            losses = _of_parts(loss_of, parts, shares, replace(step, checked=True))
    except Exception:
        return ""  # A step may not run on fewer examples, or outside tf.function.
    if not np.isfinite(whole) or whole != again:
        return ""
    for kind, found in {"mean": np.dot(shares, losses), "sum": sum(losses)}.items():
        if abs(found - whole) <= _tolerance(model) * abs(whole):
            return kind
    return "other"


def _in_parts(model: keras.Model, data: Any) -> tuple[list[Any], list[float]]:
    """Return two uneven parts of `data`, and their shares."""
    size = int(tf.nest.flatten(data)[0].shape[0])
    cut = _cut(size, outputs_read_as_rows(model, data))
    return [_rows(data, 0, cut), _rows(data, cut, size)], [cut / size, (size - cut) / size]


def _cut(size: int, outputs: int) -> int:
    """Return the number of examples in the first of two uneven parts, none of which has `outputs` examples."""
    cuts = range(size // 2 + 1, size)
    return next((cut for cut in cuts if outputs not in (cut, size - cut)), size // 2 + size % 2)


def state_of(model: keras.Model) -> list[tf.Variable]:
    """Return the numeric variables that a step may change without an optimizer, except metrics and random seeds."""
    counted = [v for metric in metrics_of(model) for v in metric.variables]
    left_out = [*seed_variables(model), *model.metrics_variables, *counted]
    # A user's train_step may assign to any weight, including untrained ones (those of a teacher).
    held = own_non_trainable_variables(model) if trains_by_keras(model) else model.variables
    known = map(tf_variable, without(held, left_out))
    found = [*known, *untracked_variables(model)]
    return [v for v in found if v.dtype.is_floating or v.dtype.is_integer]


def counts_of(model: keras.Model) -> list[tf.Variable]:
    """Return the states of metrics that may be given one number per batch: means, sums and the user's own metrics."""
    general = [m for m in metrics_of(model) if not is_known_to_add_up(m)]
    own = [m for m in general if m is not getattr(model, "_loss_tracker", None)]
    found = [tf_variable(v) for v in unique(v for metric in own for v in metric.variables)]
    return [v for v in found if v.dtype.is_floating]


def _kinds(model: keras.Model, data: Any, parts: Sequence[Any], shares: Sequence[float]) -> Kinds:
    """Return how the variables of `state_of`, followed by those of `counts_of`, grow in a step."""
    variables = [*state_of(model), *counts_of(model)]

    def run(part: Any) -> None:
        with numbers_kept(model):
            _marks(model, part, None)

    try:
        with unchanged(model), _repeatable(model):
            return kinds_of_growth(variables, run, data, parts, shares)
    except Exception:
        return Kinds()  # The step may not run on a part; see _verdict.


def _verdict(
    model: keras.Model, data: Any, parts: Sequence[Any], shares: Sequence[float], step: Step
) -> tuple[Verdict, bool]:
    """Return the verdict on the gradients, and whether a step changes anything in `state_of` and `counts_of`."""
    once: tuple[int, ...] = ()
    moves = False

    def marks(part: Any, own: Step) -> Marks:
        return _marks_alone(model, part, own)[0]

    try:
        step = replace(step, checked=True)
        with unchanged(model), _repeatable(model):
            whole, moved = _first_marks(model, data)
            moves = bool(moved)
            again, _ = _marks_alone(model, data, None)
            weighted = _of_parts(marks, parts, shares, step)
            once = _looked_up_once(model, whole, weighted[0])
            # An overflow in float16 says nothing about the rest.
            finite = all(np.isfinite(mark).all() for mark in whole.values())
            if not whole or not finite:
                waits = not whole and _waits(model, moved)
                return Verdict(once=once, why_not=WAITS if waits else ""), moves
            if _gap(model, whole, again)[1] > 0:
                return Verdict(once=once, why_not=DRAWS), moves
            worst, gap = _gap(
                model, whole, _sum(weighted, [1.0, 1.0] if step.share_in_loss else shares)
            )
            # Zero gradients add up either way.
            as_sum = (gap > 0 or not _norm(whole)) and not _gap(
                model, whole, _sum(_of_parts(marks, parts, [1.0, 1.0], step), [1.0, 1.0])
            )[1]
    except Exception as error:
        # A step may not run on fewer examples, or outside tf.function; if it fails in training, that is reported there.
        return Verdict(once=once, why_not=in_one_line(error)), moves
    return Verdict(gap == 0, as_sum, worst, gap, once), moves


def in_one_line(error: Exception) -> str:
    """Return an error's class and the first line of its message."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _looked_up_once(model: keras.Model, whole: Marks, part: Marks) -> tuple[int, ...]:
    names = [variable_name(v) for v in model.trainable_variables]
    common = [n for n in whole.keys() & part.keys() if whole[n][2] and whole[n][2] == part[n][2]]
    return tuple(place for place, name in enumerate(names) if name in common)


def _of_parts(
    run: Callable[[Any, Step], Result], parts: Sequence[Any], shares: Sequence[float], step: Step
) -> list[Result]:
    """Return the result of `run` for each part, as on a rank with this share of the whole."""
    counted: list[list[tf.Tensor]] = [[] for _ in parts]
    steps = [replace(step, share=tf.constant(share, tf.float32)) for share in shares]
    found = [
        run(part, replace(own, total=_count(divisors)))
        for part, own, divisors in zip(parts, steps, counted, strict=True)
    ]
    totals = [tf.add_n(each) for each in zip(*counted, strict=True)]
    if totals:  # The divisors of the losses are known only now.
        found = [
            run(part, replace(own, total=_tell(iter(totals))))
            for part, own in zip(parts, steps, strict=True)
        ]
    return found


def _sum(found: Sequence[Marks], weights: Sequence[float]) -> Marks:
    return {
        name: np.sum([w * marks[name] for w, marks in zip(weights, found, strict=True)], axis=0)
        for name in found[0]
    }


def _count(counted: list[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    def total(divisor: tf.Tensor) -> tf.Tensor:
        counted.append(divisor)
        return divisor

    return total


def _tell(totals: Iterator[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda divisor: next(totals)


def _rows(data: Any, begin: int, end: int) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf[begin:end], data)


def _aside(data: Any) -> Any:
    """Return `data` with floating-point inputs changed by up to 1 % of the largest, each number otherwise."""

    def moved(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return leaf
        waves = tf.reshape(tf.cos(tf.range(tf.size(leaf), dtype=tf.float32)), tf.shape(leaf))
        return leaf + 0.01 * tf.reduce_max(tf.abs(leaf)) * tf.cast(waves, leaf.dtype)

    return tf.nest.map_structure(moved, data)


def _marks(model: keras.Model, data: Any, step: Step | None) -> Marks:
    """Run the model's train_step without applying gradients; return the marks of those it would apply."""
    found: Marks = {}

    def take(pairs: list[tuple[Any, Any]]) -> bool:
        for gradient, variable in pairs:
            if gradient is not None:
                name = variable_name(variable)
                found[name] = found.get(name, 0.0) + _mark(gradient)
        return True

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(gradients_taken(optimizer, take))
        stack.enter_context(in_step(step))
        stack.enter_context(in_trial())
        model.train_step(data)
    return found


def _marks_alone(model: keras.Model, data: Any, step: Step | None) -> tuple[Marks, set[int]]:
    """Return `_marks`, and the ids of the variables of `state_of` and `counts_of` that it changed; undo the changes."""
    state = [*state_of(model), *counts_of(model)]
    before = [variable.numpy() for variable in state]
    with numbers_kept(model):
        found = _marks(model, data, step)
    moved = {
        id(v)
        for v, value in zip(state, before, strict=True)
        if not np.array_equal(v.numpy(), value)
    }
    for variable, value in zip(state, before, strict=True):
        variable.assign(value)
    return found, moved


def _first_marks(model: keras.Model, data: Any) -> tuple[Marks, set[int]]:
    """Return `_marks_alone` for the first step that applies gradients; the state remains that before this step."""
    for _ in range(STEPS):
        found, moved = _marks_alone(model, data, None)
        if found or not _waits(model, moved):
            break
        _marks(model, data, None)
    return found, moved


def _waits(model: keras.Model, moved: set[int]) -> bool:
    """Return whether a step that applied no gradients may do so later: it did not assign to weights directly."""
    trained = {id(tf_variable(v)) for v in model.trainable_variables}
    return bool(trained) and not trained & moved


def _mark(gradient: Any) -> np.ndarray:
    """Return the projection of a gradient on a fixed direction, its norm, and its number of slices (see `Marks`)."""
    slices = 0
    if isinstance(gradient, tf.IndexedSlices):
        values, rows = gradient.values, gradient.indices
        slices = int(tf.size(rows))
    else:
        values = tf.reshape(gradient, [1]) if not gradient.shape.rank else gradient
        rows = tf.range(tf.shape(values)[0])
    values = tf.reshape(tf.cast(values, tf.float32), [tf.size(rows), -1])
    columns = tf.range(tf.shape(values)[1])
    across = tf.linalg.matvec(values, tf.cos(tf.cast(columns, tf.float32)))
    along = tf.reduce_sum(across * tf.cos(tf.cast(rows, tf.float32)))
    return np.array([along, tf.norm(values), slices], np.float64)


def _gap(model: keras.Model, whole: Marks, other: Marks) -> tuple[str, float]:
    """Return the variable whose gradient differs most, and the relative difference; 0 within the tolerance."""
    if whole.keys() != other.keys():
        return next(iter(whole.keys() ^ other.keys())), 1.0
    limit = _tolerance(model)
    # A gradient that is only rounding error (the bias of attention keys) has no direction.
    floor = 1e-3 * _norm(whole)
    worst, gap = "", 0.0
    for name, mark in whole.items():
        own = abs(mark[0] - other[name][0]) / max(mark[1], floor, 1e-12)
        if not own <= max(limit, gap):
            worst, gap = name, float(own)
    return worst, gap


def _tolerance(model: keras.Model) -> float:
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return max(TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)


def _norm(marks: Marks) -> float:
    """Return the global norm of all gradients."""
    return float(np.sqrt(sum(mark[1] ** 2 for mark in marks.values())))


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """When the block ends, restore all variables that a step may change without an optimizer."""
    # Including those of metrics that the model does not list.
    counted = [v for metric in metrics_of(model) for v in metric.variables]
    kept = [*model.non_trainable_variables, *model.metrics_variables, *counted]
    kept += untracked_variables(model)
    if (seed := global_seed_variable(create=False)) is not None:
        kept.append(
            seed
        )  # The next draw must be the same as without a probe, as in the run that is resumed.
    if not trains_by_keras(model):
        kept += model.trainable_variables
    targets = [tf_variable(v) for v in unique(kept)]
    values = [target.numpy() for target in targets]
    try:
        with numbers_kept(model):
            yield
    finally:
        for target, value in zip(targets, values, strict=True):
            target.assign(value)


@contextlib.contextmanager
def _repeatable(model: keras.Model) -> Iterator[None]:
    """Inside the block, let Keras layers draw nothing at random and normalize by their moving statistics."""
    changed = [layer for layer in model._flatten_layers() if _differs_by_nature(layer)]
    for layer in changed:
        object.__setattr__(layer, "call", functools.partial(_in_inference, layer))
    eagerly = tf.config.functions_run_eagerly()
    precision = tf.config.experimental
    # GPUs multiply float32 in TensorFloat-32 by default, with the significant bits of float16, and not alike for
    # batches of different sizes: the gradients of deep networks then differ by a tenth.
    tf32 = precision.tensor_float_32_execution_enabled()
    # A step may call tf.functions of its own, in which gradients would have no values yet.
    tf.config.run_functions_eagerly(True)
    precision.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        precision.enable_tensor_float_32_execution(tf32)
        tf.config.run_functions_eagerly(eagerly)
        for layer in changed:
            object.__delattr__(layer, "call")


def _in_inference(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).call(layer, *args, **kwargs | {"training": False})


def _differs_by_nature(layer: Any) -> bool:
    knows_training = getattr(layer, "_call_has_training_arg", False)
    return knows_training and (
        batch_dependence.normalizes(layer) or batch_dependence.has_generator(layer)
    )
