"""Logs of a step that are no results of metrics, but have a value that a single process would find.

- Those that a step computes from its metrics' results, such as perplexity, the exponential of the mean loss. When the
  states of all ranks are merged, the step is run again with frozen metrics and weights, on its data and on zeros: logs
  that are equal in both, and on all ranks, depend on the states alone, and so have the values of a single process.
- Sums over the examples, such as their number. The step is run on a few examples, and on these examples twice.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.metrics import as_value
from hvdtrain.keras_internals.metric_calls import frozen, metrics_of
from hvdtrain.keras_internals.models import flat_logs, gradients_of_all_taken
from hvdtrain.strategies.trial import rows_of, tolerance, unchanged

EXAMPLES = 8
"""Largest number of examples on which a log is tried for being a sum."""

TRIES = 3
"""How often a log that is 0 is tried for being a sum."""


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
        self._is_sum: dict[str, bool] = {}
        self._tries: Counter[str] = Counter()

    def sums(self, names: Sequence[str], data: Any) -> list[str]:
        """Return those of `names` that are sums over the examples of a batch. A collective while names are new.

        Args:
            names: Names of logs; the same on all ranks.
            data: Data of a step of this rank.
        """
        if new := [name for name in names if name not in self._is_sum]:
            votes: dict[str, bool | None] = {}
            # A step may not run outside its graph, or on other sizes.
            with contextlib.suppress(Exception):
                votes = self._grow_twofold(new, data)
            everyone = self._ranks.exchange(votes, "sums")
            for name in new:
                found = [theirs.get(name, False) for theirs in everyone]
                self._tries[name] += 1
                known = any(vote is not None for vote in found)
                if known or self._tries[name] == TRIES:
                    self._is_sum[name] = known and all(vote is not False for vote in found)
        return [name for name in names if self._is_sum.get(name)]

    def _grow_twofold(self, names: Sequence[str], data: Any) -> dict[str, bool | None]:
        """Return whether the logs are twice as large for examples that are there twice; None for a log that is 0."""
        once = rows_of(data, 0, EXAMPLES)
        twice = tf.nest.map_structure(lambda leaf: tf.concat([leaf, leaf], 0), once)
        one, two = (self._run(each) for each in (once, twice))
        limit = tolerance(self._model)
        return {
            name: np.allclose(two[name], 2 * np.asarray(one[name]), limit, 0.0)
            if np.any(one[name])
            else None
            for name in names
        }

    def values(self, names: Sequence[str], data: Any) -> dict[str, Any]:
        """Return the values of those logs in `names` that depend only on the metrics' states. A collective.

        Args:
            names: Names of logs; the same on all ranks.
            data: Data of a step of this rank.
        """
        open_ = [name for name in names if name not in self._of_batch]
        if not open_:
            return {}
        mine: dict[str, Any] = {}
        # A step may not run outside its graph, or on zeros.
        with contextlib.suppress(Exception):
            empty = tf.nest.map_structure(tf.zeros_like, data)
            run, other = (self._run(each) for each in (data, empty))
            both = {name: (np.asarray(run[name]), np.asarray(other[name])) for name in open_}
            mine = {name: one for name, (one, two) in both.items() if np.array_equal(one, two)}
        everyone = self._ranks.exchange(mine, "state_logs")
        # Unequal ones depend on the number of examples.
        found = [
            name
            for name in open_
            if all(
                name in theirs and np.allclose(theirs[name], everyone[0][name])
                for theirs in everyone
            )
        ]
        self._of_batch |= set(open_) - set(found)
        return {name: as_value(mine[name]) for name in found}

    def _run(self, data: Any) -> dict[str, Any]:
        """Return the logs of a step, without changing any variable."""
        model = self._model
        no_updates = gradients_of_all_taken(model, lambda pairs: True)
        with unchanged(model), frozen(metrics_of(model)), no_updates:
            return flat_logs(self._step(data))
