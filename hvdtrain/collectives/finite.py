"""Weights that have become nan or inf: equal on all ranks, so that no comparison of replicas finds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import warn_user
from hvdtrain.keras_internals.variables import tf_variable, unique, variable_name

ADVICE = (
    "look for nan in the data and for a loss that divides by 0 or takes the logarithm of 0, lower the learning rate, "
    "or clip the gradients (clipnorm of the optimizer)"
)
"""For messages about nan."""


class FiniteWatch:
    """Warns once of weights that are nan or inf. Training continues, as in plain Keras."""

    def __init__(self) -> None:
        self._warned = False

    def look(self, variables: Iterable[Any], when: str) -> None:
        """Warn if one of `variables` is not finite, naming the first: a pass over their values.

        Args:
            variables: Keras or TensorFlow variables.
            when: for the message, such as "after epoch 3".
        """
        if self._warned:
            return
        broken = not_finite(variables)
        if broken:
            self._warned = True
            warn_user(
                f"{broken[0]!r} has become nan or inf {when}"
                f"{f' (and {len(broken) - 1} more)' if len(broken) > 1 else ''}. Training continues, as in plain "
                f"Keras, but such weights do not recover: {ADVICE}"
            )


def not_finite(variables: Iterable[Any]) -> list[str]:
    """Return the names of those of `variables`, Keras's or TensorFlow's, that hold nan or inf."""
    return [variable_name(v) for v in unique(variables) if not _variable_is_finite(v)]


def is_finite(array: np.ndarray, or_inf: bool = False) -> bool:
    """Whether an array, of any dtype that a variable has, holds neither nan nor inf; `or_inf`: no nan."""
    if array.dtype.kind == "V":  # bfloat16 and its like
        array = array.astype(np.float32)
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        # In one pass, and without an array of answers. The sum of finite numbers may be inf.
        if np.isfinite(array.sum()):
            return True
    return not np.isnan(array).any() if or_inf else bool(np.isfinite(array).all())


def _variable_is_finite(variable: Any) -> bool:
    held = tf_variable(variable)  # A tensor, of a variable that lies on servers.
    if not held.dtype.is_floating or held.dtype.size == 1:
        return True  # Whole numbers; and TensorFlow tests no float8.
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(held))))
