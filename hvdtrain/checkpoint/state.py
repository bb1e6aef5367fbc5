"""The whole state of a training in data parallel: taken from the ranks, and given to them.

The variables that all ranks have alike go through `parallel.gather_scatter`, under the names that they have in every
layout. Beside them stands what each rank has of its own: seeds, statistics that are averaged only when the epoch ends,
gradients that wait, metrics in the middle of an epoch. A sum of these would not be the same to the bit.

Not in it: the counters of TensorFlow's own stateful random operations (tf.random.normal), which cannot be read.
"""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.collectives.statistics import statistics_variables
from hvdtrain.keras_internals.optimizers import accumulators, optimizer_slots
from hvdtrain.keras_internals.variables import (
    global_seed_variable,
    local_variables,
    row_states,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
)
from hvdtrain.parallel.gather_scatter import Piece, State, gather, scatter
from hvdtrain.parallel.state_layout import Sender, pieces_of

Own = dict[str, Any]


class TrainingState:
    """The state of a model, its optimizer and its metrics, all built.

    Args:
        model: that this rank trains.
        ranks: all that train it.
    """

    def __init__(self, model: keras.Model, ranks: Communicator) -> None:
        self._model = model
        self._ranks = ranks

    def take(self, of_callbacks: Any) -> tuple[State, list[Own]]:
        """Return the variables, on rank 0, and what each rank has of its own, on all. A collective.

        Args:
            of_callbacks: the state of this rank's; what `encoding.encode` takes.
        """
        arrays = gather(self._pieces(), self._ranks)
        seed = global_seed_variable(create=False)
        own = {
            "variables": [tf_variable(v).numpy() for v in own_variables(self._model)],
            "random": random.getstate(),
            "numpy": np.random.get_state(),
            "keras": None if seed is None else tf_variable(seed).numpy(),
            "callbacks": of_callbacks,
        }
        return arrays, self._ranks.exchange(own, "own_state")

    def give(self, arrays: State | None, ranks: list[Own] | None) -> Any:
        """Set what `take` returned; return the state of this rank's callbacks. A collective.

        Args:
            arrays: on rank 0; others' is not looked at.
            ranks: likewise.

        Raises:
            UsageError: on all ranks: the variables do not fit; names the first one.
        """
        scatter(self._pieces(), arrays, self._ranks)
        own = self._ranks.exchange(ranks, "own_state")[0][self._ranks.rank()]
        for variable, value in zip(own_variables(self._model), own["variables"], strict=True):
            tf_variable(variable).assign(value)
        if own["keras"] is not None:
            tf_variable(global_seed_variable(create=True)).assign(own["keras"])
        # Last: Keras may have made its global generator of Python's random numbers just now.
        random.setstate(own["random"])
        np.random.set_state(own["numpy"])
        return own["callbacks"]

    def _pieces(self) -> list[Piece]:
        first = self._ranks.rank() == 0
        return pieces_of(self._model.variables, self._model.optimizer, Sender(first, first, first))


def own_variables(model: keras.Model) -> list[Any]:
    """Return the variables that may differ between ranks which train `model` in data parallel."""
    local = local_variables(model)
    known = {id(tf_variable(v)) for v in local}
    slots = [
        slot
        for variable, state in optimizer_slots(model.optimizer)
        if id(tf_variable(variable)) in known
        for slot in state
    ]
    return unique(
        [
            *seed_variables(model),
            *row_states(model),
            *statistics_variables(model, local),
            *untracked_variables(model),
            *local,
            *slots,
            *accumulators(model.optimizer),
            *state_variables(model.metrics),
        ]
    )
