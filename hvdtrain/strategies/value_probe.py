"""Test how the values that a step shows, not its gradients, depend on the examples of a batch.

An evaluation and a prediction have no gradients, and a process may run them without training. See probe.py for the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.keras_internals.metric_calls import counted_metrics
from hvdtrain.keras_internals.models import gradients_of_all_taken, numbers_kept
from hvdtrain.keras_internals.variables import tf_variable, values_kept
from hvdtrain.strategies.batch_dependence import is_all_of_keras
from hvdtrain.strategies.trial import (
    Result,
    in_parts,
    of_parts,
    repeatable,
    tolerance,
    unchanged,
    varied,
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
        with in_step(own):
            return float(model._compute_loss(x, y, model(x, training=False), weights, False))

    other = None if is_all_of_keras(model) else varied(data)
    kinds = {_kind(model, one, step, loss_of) for one in (data, other) if one is not None} - {""}
    return "other" if len(kinds) > 1 else "".join(kinds)


def _kind(
    model: keras.Model, data: Any, step: Step, loss_of: Callable[[Any, Step | None], float]
) -> str:
    tried = _tried(model, data, step, loss_of)
    if tried is None:
        return ""
    whole, again, losses, shares = tried
    if not np.isfinite(whole) or whole != again:
        return ""
    mean, total = float(np.dot(shares, losses)), sum(losses)
    # Losses of different signs may cancel out.
    limit = tolerance(model) * max(abs(whole), float(np.dot(shares, np.abs(losses))))
    kinds = {"mean": abs(mean - whole) <= limit, "sum": abs(total - whole) <= limit}
    fitting = [kind for kind, fits in kinds.items() if fits]
    return {0: "other", 1: "".join(fitting), 2: ""}[len(fitting)]


def _tried(
    model: keras.Model, data: Any, step: Step, run: Callable[[Any, Step | None], Result]
) -> tuple[Result, Result, list[Result], list[float]] | None:
    """Return the results of `run` for `data`, twice, and for its parts, with the parts' shares; None if it fails."""
    parts, shares = in_parts(model, data)
    try:
        with unchanged(model), repeatable(model):
            whole, again = run(data, None), run(data, None)
            return whole, again, of_parts(run, parts, shares, replace(step, checked=True)), shares
    except Exception:
        return None  # A step may not run on fewer examples, or outside tf.function.


def batch_statistics(
    model: keras.Model, data: Any, step: Step, run: Callable[[Any], Any]
) -> list[str]:
    """Return the names of means that get one number for a batch which is no mean over its examples, such as a maximum.

    No communication. Without those whose number differs each time.

    Args:
        model, data, step: As in `probe`.
        run: The model's train_step or test_step.
    """
    # The function of a wrapper is tried by itself: see step_metrics.py.
    wrapper = keras.metrics.MeanMetricWrapper
    counted = [m for m in counted_metrics(model) if isinstance(m, keras.metrics.Mean)]
    means = [metric for metric in counted if not isinstance(metric, wrapper)]
    totals = [tf_variable(metric.total) for metric in means]
    if not means:
        return []

    def growth(part: Any, own: Step | None) -> list[float]:
        before = [float(total) for total in totals]
        with (
            values_kept(totals),
            numbers_kept(model),
            in_step(own),
            gradients_of_all_taken(model, lambda pairs: True),
        ):
            run(part)
            return [float(total) - begin for total, begin in zip(totals, before, strict=True)]

    tried = _tried(model, data, step, growth)
    if tried is None:
        return []
    whole, again, several, shares = tried
    limit = tolerance(model)
    found = []
    for metric, one, other, *each in zip(means, whole, again, *several, strict=True):
        fits = np.isclose(one, [sum(each), np.dot(shares, each)], limit, limit).any()
        if one == other and not fits and not np.allclose(one, each, limit, limit):
            found.append(metric.name)
    return found


def predicts_together(model: keras.Model, data: Any, step: Step) -> bool:
    """Return whether what predict_step returns for an example depends on the others in its batch. No communication.

    Args:
        model, data, step: As in `probe`.
    """

    def outputs(part: Any, own: Step | None) -> list[np.ndarray]:
        return [np.asarray(output) for output in tf.nest.flatten(model.predict_step(part))]

    tried = _tried(model, data, step, outputs)
    if tried is None:
        return False
    whole, again, several, _ = tried
    limit = tolerance(model)

    def alike(one: Any, other: Any) -> bool:
        if one.dtype.kind not in "fiub":
            return np.array_equal(one, other)
        size = np.abs(other).max(initial=1e-6, where=np.isfinite(other))
        return np.allclose(one, other, rtol=0.0, atol=limit * size, equal_nan=True)

    for one, other, *each in zip(whole, again, *several, strict=True):
        rows = sum(len(part) for part in each if part.ndim)
        if not one.ndim or rows != len(one) or any(p.shape[1:] != one.shape[1:] for p in each):
            continue  # Not one output for each example, or of another size in each batch.
        if alike(one, other) and not alike(np.concatenate(each), one):
            return True
    return False
