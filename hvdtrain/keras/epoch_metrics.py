"""States of Keras's own metrics after an epoch of model.fit on one rank, and their results over all ranks.

Summing the states is exact (see collectives/metric_merging.py, and its test of all of Keras's metrics). A mean of the
ranks' results is not, for precision, AUC, a root, or ranks with different numbers of examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Min
from hvdtrain.collectives.metric_merging import MetricState
from hvdtrain.collectives.metrics import as_value, merge_state, read_state, write_state
from hvdtrain.keras_internals.metric_calls import LogSource, is_of_keras, metrics_of, watched


@dataclass(frozen=True)
class Counted:
    """Snapshot of a model's metrics.

    Attributes:
        metrics: Metrics whose class is Keras's own.
        state: Values of their variables.
        sources: Metric behind each name in the logs.
        results: Their results on this rank, by name in the logs.
    """

    metrics: list[keras.metrics.Metric]
    state: MetricState
    sources: dict[str, LogSource]
    results: dict[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> Counted:
        """Return a snapshot of the metrics of a compiled model."""
        found = metrics_of(model)
        with watched(found) as calls:
            results = model.get_metrics_result()
        sources = {n: s for n, s in calls.sources(results).items() if is_of_keras(s.metric)}
        metrics = [metric for metric in found if is_of_keras(metric)]
        values = {name: np.array(results[name]) for name in sources}
        return cls(metrics, read_state(metrics), sources, values)

    def over_all_ranks(self, logs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the results over all ranks of the metrics whose results are in the logs. A collective.

        Args:
            logs: Logs of the epoch, with the same names on all ranks.
            prefix: Prefix of the metrics' names in `logs`, such as "val_".
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
