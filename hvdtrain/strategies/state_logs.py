"""Logs that a step computes from its metrics' results, such as perplexity, the exponential of the mean loss.

When the states of all ranks are merged, the step is run again with frozen metrics and weights, on its data and on
zeros: logs that are equal in both depend on the states alone, and so have the values of a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator, Min
from hvdtrain.collectives.metrics import as_value
from hvdtrain.keras_internals.metric_calls import frozen, metrics_of
from hvdtrain.keras_internals.models import flat_logs, optimizers_of
from hvdtrain.keras_internals.optimizers import gradients_taken
from hvdtrain.strategies.trial import unchanged


class StateLogs:
    """Finds such logs for one step of a model.

    Args:
        model: Model whose metrics hold the merged states.
        step: Its train_step or test_step.
        ranks: Ranks that run the step together.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], Any], ranks: Communicator) -> None:
        self._model = model
        self._step = step
        self._ranks = ranks
        self._of_batch: set[str] = set()

    def values(self, names: Sequence[str], data: Any) -> dict[str, Any]:
        """Return the values of those logs in `names` that depend only on the metrics' states. A collective.

        Args:
            names: Names of logs; the same on all ranks.
            data: Data of a step of this rank.
        """
        open_ = [name for name in names if name not in self._of_batch]
        if not open_:
            return {}
        alike = [False] * len(open_)
        run: dict[str, Any] = {}
        # A step may not run outside its graph, or on zeros.
        with contextlib.suppress(Exception):
            empty = tf.nest.map_structure(tf.zeros_like, data)
            run, other = (self._run(each) for each in (data, empty))
            alike = [np.array_equal(np.asarray(run[n]), np.asarray(other[n])) for n in open_]
        votes = self._ranks.allreduce(np.array(alike, np.int32), "hvdtrain_state_logs", Min)
        found = [name for name, vote in zip(open_, votes.numpy(), strict=True) if vote]
        self._of_batch |= set(open_) - set(found)
        return {name: as_value(run[name]) for name in found}

    def _run(self, data: Any) -> dict[str, Any]:
        """Return the logs of a step, without changing any variable."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged(self._model))
            stack.enter_context(frozen(metrics_of(self._model)))
            for optimizer in optimizers_of(self._model):
                stack.enter_context(gradients_taken(optimizer, lambda pairs: True))
            return flat_logs(self._step(data))
