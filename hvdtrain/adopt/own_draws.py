"""Random numbers of layers, such as dropout: ranks use different seeds only while they share batches.

A step that every rank computes on whole batches, before or after, must draw the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.replicas import copy_variables
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.keras_internals.variables import assign, seed_variables, tf_variable
from hvdtrain.runtime import Rank
from hvdtrain.trainer import Trainer


@contextlib.contextmanager
def own_draws(model: keras.Model, trainer: Trainer, rank: Rank) -> Iterator[None]:
    """Let each rank draw its own numbers in this block. Afterwards all have the seeds of rank 0, by a collective.

    Args:
        model: A model with the same seeds on all ranks.
        trainer: Its Trainer, which makes the seeds differ when it prepares the model, once.
        rank: This process's place in the job.
    """
    seeds = [tf_variable(one) for one in seed_variables(model)]
    before = [one.numpy() for one in seeds]
    if trainer.steps is not None:
        fold_rank_into_seeds(seeds, rank.rank)
    try:
        yield
    except BaseException:
        assign(seeds, before)
        raise
    copy_variables(seed_variables(model), 0, ALL_RANKS)  # Also those that the fit has created.
