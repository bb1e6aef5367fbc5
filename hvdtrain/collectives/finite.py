"""Detection of weights that have become nan or inf. They may be equal on all ranks, so replica checks miss them."""

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
"""Advice for messages about nan."""


class FiniteWatch:
    """Warns once about weights that are nan or inf. Training continues, as in plain Keras."""

    def __init__(self) -> None:
        self._warned = False

    def look(self, variables: Iterable[Any], when: str) -> None:
        """Warn if one of `variables` is not finite, and name the first. Costs one pass over their values.

        Args:
            variables: Keras or TensorFlow variables.
            when: Part of the message, such as "after epoch 3".
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
    """Return the names of the Keras or TensorFlow variables in `variables` that hold nan or inf."""
    return [variable_name(v) for v in unique(variables) if not _variable_is_finite(v)]


def is_finite(array: np.ndarray, or_inf: bool = False) -> bool:
    """Whether `array` holds neither nan nor inf; with `or_inf`, whether it holds no nan. Any variable's dtype."""
    if array.dtype.kind == "V":  # bfloat16 and other extension types
        array = array.astype(np.float32)
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass, without a temporary array. The sum of finite numbers may be inf.
        if np.isfinite(array.sum()):
            return True
    return not np.isnan(array).any() if or_inf else bool(np.isfinite(array).all())


def _variable_is_finite(variable: Any) -> bool:
    held = tf_variable(variable)  # A tensor, if the variable is on parameter servers.
    if not held.dtype.is_floating or held.dtype.size == 1:
        return True  # Integers, and float8, for which TensorFlow has no is_finite.
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(held))))
