"""What Keras's own metrics have counted in an epoch of model.fit on one rank, and their results over all ranks.

Their states add up (see collectives/metric_merging.py, and the test of all of them), which a mean of results does
not give: precision, AUC, a root, or shares of unequal size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Min
from hvdtrain.collectives.metric_merging import State
from hvdtrain.collectives.metrics import as_value, merge_state, read_state, write_state
from hvdtrain.keras_internals.metric_calls import Source, is_of_keras, metrics_of, watched


@dataclass(frozen=True)
class Counted:
    """The metrics of a model at one time.

    Attributes:
        metrics: those of Keras.
        state: their variables' values.
        sources: which of them stands behind each name in the logs.
        results: their values on this rank.
    """

    metrics: list[keras.metrics.Metric]
    state: State
    sources: dict[str, Source]
    results: dict[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> Counted:
        """Return what the metrics of a compiled model have counted since their reset."""
        found = metrics_of(model)
        with watched(found) as calls:
            results = model.get_metrics_result()
        sources = {n: s for n, s in calls.sources(results).items() if is_of_keras(s.metric)}
        metrics = [metric for metric in found if is_of_keras(metric)]
        values = {name: np.array(results[name]) for name in sources}
        return cls(metrics, read_state(metrics), sources, values)

    def over_all_ranks(self, logs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the results of all ranks together, for those of `logs` that are results here. A collective.

        Args:
            logs: of the epoch, with the same names on all ranks.
            prefix: before the metrics' names in `logs`.
        """
        names = [name for name in self.sources if prefix + name in logs]
        if not names:
            return {}
        same = [np.array_equal(self.results[n], logs[prefix + n], equal_nan=True) for n in names]
        votes = ALL_RANKS.allreduce(np.array(same, np.int32), "hvdtrain_epoch_names", Min).numpy()
        now = read_state(self.metrics)
        write_state(self.metrics, self.state)
        merge_state(self.metrics)
        merged = {
            prefix + name: as_value(self.sources[name].value())
            for name, vote in zip(names, votes, strict=True)
            if vote
        }
        write_state(self.metrics, now)
        return merged
