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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.keras_internals.compiled_losses import outputs_read_as_rows
from hvdtrain.keras_internals.metric_calls import counted_metrics, metrics_of
from hvdtrain.keras_internals.models import (
    gradients_of_all_taken,
    numbers_kept,
    own_non_trainable_variables,
    trains_by_keras,
)
from hvdtrain.keras_internals.variables import (
    identities,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
    variable_name,
    without,
)
from hvdtrain.strategies.batch_dependence import is_all_of_keras
from hvdtrain.strategies.stateful_updates import Kinds, kinds_of_growth
from hvdtrain.strategies.trial import (
    in_one_line,
    in_parts,
    of_parts,
    repeatable,
    rows_of,
    tolerance,
    unchanged,
    varied,
)

EXAMPLES = 5
"""Largest number of examples that the probe uses, in parts of 3 and 2."""

NEAR_A_KINK = 0.1
"""Gap up to which the probe is repeated a little aside of the examples. A GPU computes batches of other sizes by other
algorithms, so that rounding may decide whether a ReLU passes a value near 0: 5e-3 was seen in a ResNet-50."""

DRAWS = "its gradients differ each time it runs on the same examples (random numbers?)"
"""Reason why a step with random gradients cannot be judged."""

STEPS = 16
"""Most steps to wait for one that applies gradients: a step may accumulate them, or train several models in turn."""

WAITS = f"its first {STEPS} steps apply no gradients"
"""Reason why a step that waits for longer cannot be judged."""

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
        varied: Whether the gradients add up, but not those of other labels and padding; see `trial.varied`.
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
    varied: bool = False


def probe(model: keras.Model, data: Any, step: Step) -> Verdict:
    """Test whether the gradients of the parts of `data` add up to those of `data`. No communication.

    Args:
        model: Built and compiled model with exact losses (see losses.make_exact).
        data: Argument of train_step: tensors with at least 2 examples along the leading dimension.
        step: How a rank's part is weighted.
    """
    size = int(tf.nest.flatten(data)[0].shape[0])
    if size == outputs_read_as_rows(model, data) > 2:
        return probe(model, rows_of(data, 0, size - 1), step)
    verdict, moves = _verdict(model, data, step)
    if verdict.as_mean is not False or verdict.as_sum:
        verdict = _with_others(verdict, model, data, step)
    kinds = _kinds(model, data) if moves else Kinds()
    own = len(state_of(model))
    return replace(
        verdict,
        summed=tuple(place for place in kinds.summed if place < own),
        averaged=tuple(place for place in kinds.averaged if place < own),
        unclear=tuple(place for place in kinds.unclear if place < own),
        counted=tuple(place - own for place in kinds.summed if place >= own),
    )


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
    """Return the states of `counted_metrics`."""
    own = counted_metrics(model)
    found = [tf_variable(v) for v in unique(v for metric in own for v in metric.variables)]
    return [v for v in found if v.dtype.is_floating]


def _kinds(model: keras.Model, data: Any) -> Kinds:
    """Return how the variables of `state_of`, followed by those of `counts_of`, grow in a step."""
    parts, shares = in_parts(model, data)
    variables = [*state_of(model), *counts_of(model)]

    def run(part: Any) -> None:
        with numbers_kept(model):
            _marks(model, part, None)

    try:
        with unchanged(model), repeatable(model):
            return kinds_of_growth(variables, run, data, parts, shares)
    except Exception:
        return Kinds()  # The step may not run on a part; see _verdict.


def _verdict(model: keras.Model, data: Any, step: Step) -> tuple[Verdict, bool]:
    """Return the verdict on the gradients, and whether a step changes anything in `state_of` and `counts_of`."""
    verdict, moves = _verdict_of_one_trial(model, data, step)
    if verdict.as_mean is False and not verdict.as_sum and verdict.gap < NEAR_A_KINK:
        again, _ = _verdict_of_one_trial(model, _aside(data), step)
        verdict = again if again.as_mean else verdict
    return verdict, moves


def _verdict_of_one_trial(model: keras.Model, data: Any, step: Step) -> tuple[Verdict, bool]:
    parts, shares = in_parts(model, data)
    once: tuple[int, ...] = ()
    moves = False

    def marks(part: Any, own: Step) -> Marks:
        return _marks_alone(model, part, own)[0]

    try:
        step = replace(step, checked=True)
        with unchanged(model), repeatable(model):
            whole, moved = _first_marks(model, data)
            moves = bool(moved)
            again, _ = _marks_alone(model, data, None)
            weighted = of_parts(marks, parts, shares, step)
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
                model, whole, _sum(of_parts(marks, parts, [1.0, 1.0], step), [1.0, 1.0])
            )[1]
    except Exception as error:
        # A step may not run on fewer examples, or outside tf.function; if it fails in training, that is reported there.
        return Verdict(once=once, why_not=in_one_line(error)), moves
    return Verdict(gap == 0, as_sum, worst, gap, once), moves


def _with_others(verdict: Verdict, model: keras.Model, data: Any, step: Step) -> Verdict:
    """Return the verdict of `data` and of examples with other labels and padding.

    Keras's own code needs no second trial: it is known to be exact with any.
    """
    other = None if is_all_of_keras(model) else varied(data)
    if other is None:
        return verdict
    again, _ = _verdict(model, other, step)
    if again.as_mean is None or (again.as_mean, again.as_sum) == (verdict.as_mean, verdict.as_sum):
        return verdict
    return replace(
        again,
        as_mean=again.as_mean and verdict.as_mean is not False,
        as_sum=again.as_sum and (verdict.as_sum or verdict.as_mean is None),
        once=verdict.once,
        varied=bool(verdict.as_mean and not again.as_mean),
    )


def _looked_up_once(model: keras.Model, whole: Marks, part: Marks) -> tuple[int, ...]:
    names = [variable_name(v) for v in model.trainable_variables]
    common = [n for n in whole.keys() & part.keys() if whole[n][2] and whole[n][2] == part[n][2]]
    return tuple(place for place, name in enumerate(names) if name in common)


def _sum(found: Sequence[Marks], weights: Sequence[float]) -> Marks:
    return {
        name: np.sum([w * marks[name] for w, marks in zip(weights, found, strict=True)], axis=0)
        for name in found[0]
    }


def _aside(data: Any) -> Any:
    """Return `data` with each float changed by up to 1 %, some more than others; zeros, as of padding, stay."""

    def moved(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return leaf
        waves = tf.reshape(tf.cos(tf.range(tf.size(leaf), dtype=tf.float32)), tf.shape(leaf))
        return leaf * tf.cast(1.0 + 0.01 * waves, leaf.dtype)

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

    with gradients_of_all_taken(model, take), in_step(step):
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
    trained = identities(model.trainable_variables)
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
    limit = tolerance(model)
    # A gradient that is only rounding error (the bias of attention keys) has no direction.
    floor = 1e-3 * _norm(whole)
    worst, gap = "", 0.0
    for name, mark in whole.items():
        own = abs(mark[0] - other[name][0]) / max(mark[1], floor, 1e-12)
        if not own <= max(limit, gap):
            worst, gap = name, float(own)
    return worst, gap


def _norm(marks: Marks) -> float:
    """Return the global norm of all gradients."""
    return float(np.sqrt(sum(mark[1] ** 2 for mark in marks.values())))
