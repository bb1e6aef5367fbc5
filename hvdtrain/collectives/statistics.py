"""Per-rank state of a model that is not trained: moving statistics to average, seeds to keep apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Average, Communicator, Max
from hvdtrain.keras_internals.models import own_non_trainable_variables
from hvdtrain.keras_internals.variables import seed_variables, tf_variable, unique

SEED_STRIDE = 0x9E3779B1
"""Odd, so that no two ranks' seeds meet; the 32-bit golden ratio spreads them."""


def statistics_variables(model: keras.Model, local: Iterable[Any] = ()) -> list[Any]:
    """Return the floating-point variables that training changes without a gradient (BatchNormalization).

    Weights of a frozen layer are none: averaging them would hide that they differ.
    """
    left_out = {id(tf_variable(v)) for v in [*local, *seed_variables(model)]}
    found = [
        v for v in unique(own_non_trainable_variables(model)) if tf_variable(v).dtype.is_floating
    ]
    return [v for v in found if id(tf_variable(v)) not in left_out]


def average_statistics(
    model: keras.Model, local: Iterable[Any] = (), ranks: Communicator = ALL_RANKS
) -> None:
    """Replace moving statistics by their average over the ranks. A collective.

    Each rank's statistics come from its own examples: without this, replicas differ in evaluation.
    """
    targets = [tf_variable(v) for v in statistics_variables(model, local)]
    if not targets or ranks.size() == 1:
        return
    flat = tf.concat([tf.cast(tf.reshape(t, [-1]), tf.float64) for t in targets], axis=0)
    mean = ranks.allreduce(flat, "hvdtrain_statistics", Average)
    parts = tf.split(mean, [t.shape.num_elements() for t in targets])
    for target, part in zip(targets, parts, strict=True):
        target.assign(tf.cast(tf.reshape(part, target.shape), target.dtype))


def settle_idle(
    variables: Sequence[Any],
    before: Sequence[tf.Tensor],
    idle: bool,
    ranks: Communicator = ALL_RANKS,
) -> None:
    """After a step without examples for some ranks, give those the state that they would have. A collective.

    A variable that was the same on all ranks before the step does not depend on a rank's examples (a counter of steps,
    a copy of the weights, a spectral norm): an idle rank takes the others' new value. Any other (moving statistics,
    random seeds) it has as before.

    Args:
        variables: changed by the step, numbers or bools; the same on all ranks.
        before: their values before the step.
        idle: whether this rank was idle; the last of the ranks never is.
    """
    if not variables:
        return
    flat = tf.concat([tf.cast(tf.reshape(value, [-1]), tf.float64) for value in before], axis=0)
    bounds = ranks.allreduce(tf.concat([flat, -flat], axis=0), "hvdtrain_before_idle", Max)
    largest, negative_least = tf.split(bounds, 2)
    targets = [tf_variable(v) for v in variables]
    new = tf.concat([tf.cast(tf.reshape(t, [-1]), tf.float64) for t in targets], axis=0)
    is_last = ranks.rank() == ranks.size() - 1
    others = ranks.allreduce(new if is_last else tf.zeros_like(new), "hvdtrain_after_idle")
    if not idle:
        return
    sizes = [target.shape.num_elements() for target in targets]
    alike = tf.split(tf.equal(largest, -negative_least), sizes)
    for target, own, same, other in zip(
        targets, before, alike, tf.split(others, sizes), strict=True
    ):
        value = tf.cast(tf.reshape(other, target.shape), target.dtype)
        target.assign(value if bool(tf.reduce_all(same)) else own)


def fold_rank_into_seeds(model: keras.Model, rank: int) -> None:
    """Give each rank its own random numbers (dropout masks) from seeds that are the same on all.

    Rank 0 keeps the seeds, so one worker draws what plain Keras would.
    """
    for variable in seed_variables(model):
        target = tf_variable(variable)
        if rank:
            offset = (rank * SEED_STRIDE) % 2**31
            target.assign(tf.bitwise.bitwise_xor(target, tf.constant(offset, target.dtype)))
