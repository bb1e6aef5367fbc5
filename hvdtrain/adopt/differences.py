"""Tells why the result of a fit that the workers share is not that of one process."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import gradient_sizes
from hvdtrain.keras_internals.variables import seed_variables
from hvdtrain.strategies.batch_dependence import first_names

_ROUNDING = 1e-6
"""Gradient, relative to the largest, below which it is the rounding of a sum that would be 0."""
_FEW = 0.1
"""Share of a variable's elements that may have such a gradient without being mentioned."""


def known_differences(model: keras.Model, has_seed: bool) -> str:
    """Return sentences for what is known before a fit; "" if nothing is.

    Args:
        model: Model to be trained.
        has_seed: Whether the script has set a seed.
    """
    said = ""
    if not has_seed:
        said += ". The script sets no seed (keras.utils.set_random_seed), so each run differs"
    if seed_variables(model):
        said += ". Layers that draw random numbers, such as dropout, draw others than on one worker"
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    for half in sorted(dtypes & {"bfloat16", "float16"}):
        said += f". Layers compute in {half}, in which sums in another order differ by more than rounding in float32"
    return said


def differences_by_rounding(model: keras.Model) -> str:
    """Return a sentence about variables that are moved by the rounding of their gradients; "" if there are none.

    Adam and its kind divide a gradient by its own size, so that one that would be 0 with exact sums moves its variable
    as far as any other.
    """
    names: list[str] = []
    for optimizer in optimizers_of(model):
        sizes = gradient_sizes(optimizer)
        largest = max((float(tf.reduce_max(size)) for _, size in sizes), default=0.0)
        names += [variable.path for variable, size in sizes if _is_rounding(size, largest)]
    if not names:
        return ""
    return (
        f"Rounding moves {first_names(names)}: the gradient is 0 but for that, and Adam and similar optimizers scale "
        "any gradient to one size, so these weights may differ from those of one process. In front of "
        "BatchNormalization, use_bias=False avoids it"
    )


def _is_rounding(size: tf.Tensor, largest: float) -> bool:
    small = tf.logical_and(size > 0, size < _ROUNDING * largest)
    return bool(tf.reduce_mean(tf.cast(small, tf.float32)) > _FEW)
