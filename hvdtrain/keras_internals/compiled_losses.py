"""Access to the internals of a compiled model's losses and metrics. Tested with Keras 3.15."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend import get_keras_mask
from keras.src.losses.loss import apply_mask


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the Loss objects of a compiled and built model, each once."""
    compiled = getattr(model, "_compile_loss", None)
    found = [entry.loss for entry in (compiled._flat_losses or [])] if compiled else []
    return list({id(loss): loss for loss in found if isinstance(loss, keras.losses.Loss)}.values())


def own_losses(model: keras.Model) -> list[str]:
    """Return the names of the compiled losses whose function or class is not Keras's."""

    def is_keras(loss: keras.losses.Loss) -> bool:
        made_of = (type(loss), getattr(loss, "fn", type(loss)))
        return all(str(one.__module__).startswith("keras.") for one in made_of)

    return [loss.name for loss in compiled_losses(model) if not is_keras(loss)]


def mask_in_loss(y_pred: Any, own_mask: Any) -> Any:
    """Return the mask of the entries that count in a loss; None: all of them.

    Args:
        y_pred: Predictions, which may carry a mask.
        own_mask: Mask of the loss values, or None.
    """
    masks = [mask for mask in (get_keras_mask(y_pred), own_mask) if mask is not None]
    return functools.reduce(operator.and_, masks) if masks else None


def loss_weights(loss: keras.losses.Loss, mask: Any, sample_weight: Any) -> tf.Tensor | None:
    """Return the weights whose sum `loss` divides by; None if it divides by the number of entries."""
    if loss.reduction == "mean_with_sample_weight":
        if mask is None and sample_weight is None:
            return None
        weights = None if sample_weight is None else tf.cast(sample_weight, loss.dtype)
        return apply_mask(weights, mask, dtype=loss.dtype, reduction=loss.reduction)
    return None if mask is None else tf.cast(mask, tf.float32)


def outputs_read_as_rows(model: keras.Model, data: Any) -> int:
    """Return the number of outputs of a built model whose labels are one tensor; 0 otherwise.

    Run eagerly, Keras takes a tensor with as many rows for the labels of each output, one row for each.
    """
    compiled = getattr(model, "_compile_loss", None)
    _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if compiled is None or not compiled.built or not tf.is_tensor(y):
        return 0
    outputs = len(keras.tree.flatten(compiled._y_pred_build_structure))
    return outputs if outputs > 1 else 0


def needs_whole_batch(model: keras.Model) -> str | None:
    """Return an error message if a Keras loss of `model` cannot be computed from parts of a batch; otherwise None."""
    for loss in compiled_losses(model):
        function = getattr(loss, "fn", None)
        if function is keras.losses.circle:
            return (
                f"The loss {loss.name!r} compares each example with all others in the batch, but a worker has "
                "only its share of them: train on one worker"
            )
        if function in (keras.losses.dice, keras.losses.tversky):
            axis = loss._fn_kwargs.get("axis")
            if axis is None or 0 in np.atleast_1d(axis):
                return (
                    f"The loss {loss.name!r} is computed from sums over all examples of the batch, but a "
                    "worker has only its share of them: pass an axis without the first dimension, such as "
                    "axis=(1, 2, 3) for images, so that it returns one value per example; or train on one "
                    "worker"
                )
    return None


def compute_loss(model: keras.Model, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
    """Return the compiled loss plus the model's own losses."""
    return model._compute_loss(x=None, y=y, y_pred=y_pred, sample_weight=weight, training=training)


def compiled_loss(model: keras.Model, y: Any, y_pred: Any, weight: Any, track: bool) -> Any:
    """Return the compiled loss alone; with `track`, also update the running means of the outputs' losses."""
    compiled = model._compile_loss
    means = compiled._metrics
    if not track:
        compiled._metrics = [None] * len(means)
    try:
        return compiled(y, y_pred, weight)
    finally:
        compiled._metrics = means


def added_losses(model: keras.Model) -> list[Any]:
    """Return the losses that layers add (regularization and add_loss), as scalars."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


def track_loss(model: keras.Model, loss: Any, examples: Any) -> None:
    """Update the running mean "loss" in the logs with the `loss` of `examples` examples."""
    model._loss_tracker.update_state(loss, sample_weight=examples)


def build_compiled(model: keras.Model, y_pred: Any, y: Any, weight: Any) -> None:
    """Create the states of a compiled model's loss and metrics from symbolic predictions, labels and sample weights."""
    if model._compile_metrics is not None and not model._compile_metrics.built:
        backend.compute_output_spec(model.compute_metrics, None, y, y_pred, sample_weight=weight)
    if model._compile_loss is not None and not model._compile_loss.built:
        backend.compute_output_spec(model._compute_loss, None, y, y_pred, weight, training=False)


def masks_itself(model: keras.Model, y_pred: Any, y: Any, weight: Any) -> bool:
    """Whether a loss of a built compiled model masks its own values (ignore_class), given symbolic tensors."""
    masked: list[bool] = []
    losses = compiled_losses(model)

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            values = call(*args)
            masked.append(get_keras_mask(values) is not None)
            return values

        return watched

    for loss in losses:
        loss.call = watch(loss.call)
    try:
        backend.compute_output_spec(model._compute_loss, None, y, y_pred, weight, training=False)
    finally:
        for loss in losses:
            del loss.call
    return any(masked)


def drop_compiled(model: keras.Model) -> None:
    """Remove the loss and metrics of a compiled model, except the running mean that `track_loss` updates."""
    model._compile_loss = model._compile_metrics = None
