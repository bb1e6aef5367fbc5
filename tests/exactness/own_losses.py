"""Losses that users write."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class Each(keras.losses.Loss):
    """A value for each example, as Keras wants it."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(ops.cast(y, p.dtype) - p) ** 1.5, axis=-1)


class Mean(keras.losses.Loss):
    """One number for a batch: the mean."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p))


class Sum(keras.losses.Loss):
    """One number for a batch: the sum, which Keras takes for a mean."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.sum(ops.square(y - p))


class Contrastive(keras.losses.Loss):
    """Compares every example with all others: CLIP, InfoNCE."""

    def call(self, y: Any, p: Any) -> Any:
        logits = ops.matmul(p, ops.transpose(y))
        own = ops.eye(ops.shape(logits)[0])
        return ops.categorical_crossentropy(own, logits, from_logits=True)


class Whole(keras.losses.Loss):
    """A contrastive loss that overrides __call__, as Keras's example of supervised contrastive learning does."""

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return ops.mean(Contrastive().call(y, p))


def root(y: Any, p: Any) -> Any:
    """The root of the batch's mean."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


def mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))


def total(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


def each(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p), axis=-1)


def masked(y: Any, p: Any) -> Any:
    """TensorFlow's tutorial: the sum over what is no padding, by its number."""
    values = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    mask = ops.cast(ops.not_equal(y, 0), values.dtype)
    return ops.sum(values * mask) / ops.sum(mask)


def variance(y: Any, p: Any) -> Any:
    """How far the predictions of a batch lie apart."""
    return ops.mean(ops.square(y - p)) - 0.1 * ops.mean(ops.var(p, axis=0))


def triplet(y: Any, p: Any) -> Any:
    """The farthest example of the same class and the nearest of another (batch hard)."""
    y = ops.reshape(y, [-1, 1])
    apart = ops.sum(ops.square(p[:, None] - p[None]), axis=-1)
    same = ops.cast(ops.equal(y, ops.transpose(y)), p.dtype)
    far = ops.max(apart * same, axis=1)
    near = ops.min(apart + 1e3 * same, axis=1)
    return ops.mean(ops.relu(far - near + 0.5))
