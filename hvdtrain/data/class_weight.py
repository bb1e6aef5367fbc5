"""Class weights as sample weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError


def apply_class_weight(
    data: tuple, class_weight: Mapping[int, float] | None, dtype: str, where: str
) -> tuple:
    """Data (x, y[, sample_weight]) with class weights as, or times, the sample weights.

    Labels are integers of shape (n,) or (n, 1), or one-hot rows (n, classes). Every class that
    occurs needs a weight: one that was forgotten is more likely than one that was meant to be 1.
    """
    if class_weight is None:
        return data
    if not isinstance(class_weight, Mapping):
        raise UsageError(
            f"class_weight is a {type(class_weight).__name__}; it must be a dict from class "
            "number to weight, such as {0: 1.0, 1: 5.0}."
        )
    if len(data) < 2:
        raise UsageError(f"{where}: class_weight needs labels, and there is no y.")
    weights = sample_weights(data[1], class_weight, dtype, where)
    if len(data) == 3:
        weights = _times(data[2], weights, where)
    return data[0], data[1], weights


def sample_weights(
    labels: Any, class_weight: Mapping[int, float], dtype: str, where: str
) -> np.ndarray:
    """The weight of each label's class, shape (n,)."""
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
    missing = [int(c) for c in classes if int(c) not in class_weight]
    if missing:
        raise UsageError(
            f"{where}: class_weight has no weight for class {', '.join(map(str, missing))}, "
            "which occurs in y."
        )
    return np.array([class_weight[int(c)] for c in classes], dtype)[which.reshape(-1)]


def _times(given: Any, weights: np.ndarray, where: str) -> np.ndarray:
    if not isinstance(given, np.ndarray):
        raise UsageError(f"{where}: class_weight works with one output; sample_weight has several.")
    return given * weights.reshape(-1, *[1] * (given.ndim - 1))
