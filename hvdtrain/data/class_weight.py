"""Converts class weights to sample weights."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from hvdtrain.data import structures
from hvdtrain.data.rows import is_lazy
from hvdtrain.data.share import ReadOptions
from hvdtrain.errors import UsageError


def apply_class_weight(data: tuple, reading: ReadOptions, where: str) -> tuple:
    """Return (x, y, sample_weight) with the sample weights multiplied by class weights; without these, `data` itself.

    Args:
        data: Data tuple (x, y[, sample_weight]). Labels are integers of shape (n,) or (n, 1), or one-hot rows (n,
            classes).
        reading: Settings with the class weights; as in Keras, a missing class has weight 1.
        where: Name of the data in messages.

    Raises:
        UsageError: If `class_weight` is no dict of class numbers, or there are no labels, several outputs, or labels of
            another kind.
    """
    class_weight = reading.class_weight
    if class_weight is None:
        return data
    if not isinstance(class_weight, Mapping):
        raise UsageError(
            f"class_weight is a {type(class_weight).__name__}; it must be a dict from class "
            "number to weight, such as {0: 1.0, 1: 5.0}."
        )
    others = [key for key in class_weight if not isinstance(key, Integral)]
    if others:
        raise UsageError(f"class_weight has the key {others[0]!r}; classes are integers.")
    if len(data) < 2:
        raise UsageError(f"{where}: class_weight needs labels, but there is no y.")
    weights = _sample_weights(data[1], class_weight, reading.float_dtype, where)
    if len(data) == 3:
        weights = _times(data[2], weights, where)
    return data[0], data[1], weights


def weighted_element(element: Any, reading: ReadOptions) -> Any:
    """Return the signature of an example (see `Source.element`) after class weights were added as sample weights."""
    weighs = reading.class_weight is not None
    if weighs and not structures.is_bare(element) and len(element) == 2:
        return (*element, structures.Spec((), reading.float_dtype))
    return element


def _sample_weights(
    labels: Any, class_weight: Mapping[int, float], dtype: str, where: str
) -> np.ndarray:
    """Return the weight of each label's class, of shape (n,)."""
    if is_lazy(labels):
        labels = np.asarray(labels)
    if not isinstance(labels, np.ndarray):
        raise UsageError(f"{where}: class_weight works with one output; y has several.")
    if labels.ndim > 2 or labels.dtype.kind not in "buif":
        raise UsageError(
            f"{where}: class_weight needs integer labels (n,) or (n, 1), or one-hot rows "
            f"(n, classes); y has shape {labels.shape} and dtype {labels.dtype}."
        )
    if labels.ndim == 2:
        labels = labels[:, 0] if labels.shape[1] == 1 else np.argmax(labels, axis=1)
    classes, which = np.unique(np.round(labels).astype(np.int64), return_inverse=True)
    return np.array([class_weight.get(int(c), 1.0) for c in classes], dtype)[which.reshape(-1)]


def _times(given: Any, weights: np.ndarray, where: str) -> np.ndarray:
    if is_lazy(given):
        given = np.asarray(given)
    if not isinstance(given, np.ndarray):
        raise UsageError(f"{where}: class_weight works with one output; sample_weight has several.")
    return given * weights.reshape(-1, *[1] * (given.ndim - 1))
