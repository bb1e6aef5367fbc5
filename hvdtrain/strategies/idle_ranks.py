"""Idle ranks: ranks without an example in a step, because the batch is smaller than the number of ranks."""

from __future__ import annotations

import keras

from hvdtrain.collectives.communicator import Communicator, Min
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.data import Share
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.variables import seed_variables, tf_variable, without


def take_over(model: keras.Model, share: Share, ranks: Communicator) -> None:
    """After a training step, copy what it changes without a gradient to the idle ranks. A collective if there are any.

    Counters, target networks and moving statistics: an idle rank has run the step on a filler batch, so only the others
    have the right values. Metrics and random seeds differ by rank.
    """
    if not (share.some_idle or share.global_examples < ranks.size()):
        return
    own = [*state_variables(metrics_of(model)), *seed_variables(model)]
    variables = without(model.non_trainable_variables, own)
    if not variables:
        return
    mine = ranks.rank() if share.examples else ranks.size()
    busy = ranks.ranks[int(ranks.allreduce(mine, "hvdtrain_first_busy", Min))]
    for number, target in enumerate(map(tf_variable, variables)):
        value = ranks.broadcast(target.read_value(), busy, f"hvdtrain_state_of_busy_{number}")
        if not share.examples:
            target.assign(value)
