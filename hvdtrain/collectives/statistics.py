"""State of a model that differs between ranks: moving statistics, which are averaged, and random seeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Average, Communicator
from hvdtrain.keras_internals.models import own_non_trainable_variables
from hvdtrain.keras_internals.variables import row_states, seed_variables, tf_variable, without

SEED_STRIDE = 0x9E3779B1
"""Factor from rank to seed offset: odd, so that no two ranks get equal seeds; the 32-bit golden ratio spreads them."""


def statistics_variables(model: keras.Model, local: Iterable[Any] = ()) -> list[Any]:
    """Return the floating-point variables that training changes without a gradient (BatchNormalization).

    Weights of frozen layers are left out: averaging them would hide a difference between ranks.

    Args:
        model: A built model.
        local: Variables to leave out, because each rank keeps its own.
    """
    left_out = [*local, *seed_variables(model), *row_states(model)]
    found = without(own_non_trainable_variables(model), left_out)
    return [v for v in found if tf_variable(v).dtype.is_floating]


def average_statistics(
    model: keras.Model, local: Iterable[Any] = (), ranks: Communicator = ALL_RANKS
) -> None:
    """Replace the moving statistics of `model` by their average over the ranks. A collective.

    Each rank's statistics come from its own examples: without this, replicas differ in evaluation.

    Args:
        model: A built model.
        local: Variables to leave as they are.
        ranks: Ranks to average over.
    """
    targets = [tf_variable(v) for v in statistics_variables(model, local)]
    if not targets or ranks.size() == 1:
        return
    exact = [tf.cast(target, tf.float64) for target in targets]
    means = ranks.grouped_allreduce(exact, "hvdtrain_statistics", Average)
    for target, mean in zip(targets, means, strict=True):
        target.assign(tf.cast(mean, target.dtype))


def fold_rank_into_seeds(seeds: Iterable[Any], rank: int) -> None:
    """Derive each rank's random seeds (for dropout masks) from `seeds`, variables that are the same on all ranks.

    Rank 0 keeps the seeds, so that a job of one rank draws the same numbers as plain Keras.
    """
    for variable in seeds:
        target = tf_variable(variable)
        if rank:
            offset = (rank * SEED_STRIDE) % 2**31
            target.assign(tf.bitwise.bitwise_xor(target, tf.constant(offset, target.dtype)))
