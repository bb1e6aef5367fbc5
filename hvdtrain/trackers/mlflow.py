"""MLflow, through a separate client: the script's active run is not affected."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from hvdtrain.errors import UsageError
from hvdtrain.trackers.tracker import RunFacts, require_package

STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LONGEST = 500
"""Characters of a parameter's value that every MLflow server accepts."""


class MLflow:
    """Tracks a run with MLflow: values as metrics, settings as params.

    An interrupted run gets the status KILLED. Characters that MLflow does not allow in a name become "_".

    Args:
        experiment: Name of the experiment, which is created if needed. Default: $MLFLOW_EXPERIMENT_NAME, or "Default".
        tracking_uri: Server, database or folder. Default: MLflow's own, such as $MLFLOW_TRACKING_URI.
        run_name: Name of the run. Default: that of the run_dir.

    Raises:
        UsageError: If mlflow is not installed, or the URI contains a password.
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        if tracking_uri is not None and "@" in urlsplit(tracking_uri).netloc:
            raise UsageError(
                "MLflow(tracking_uri=...): the URI contains a user name or password: set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI, in the environment instead"
            )
        require_package("mlflow", "MLflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._client: Any = None
        self._id: str | None = None

    def start(self, run: RunFacts) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = client = MlflowClient(self._tracking_uri)
        # When a call is repeated, the run may be there already.
        self._id = run.id or self._id or self._new_run(self._run_name or run.name)
        known = client.get_run(self._id).data.params  # MLflow refuses another value.
        params = [
            Param(name, str(value)[:LONGEST])
            for name, value in _flat(run.config)
            if name not in known
        ]
        tags = [RunTag(name, str(run.config[name])) for name in ("hvdtrain", "workers")]
        client.log_batch(self._id, params=params, tags=[*tags, RunTag("host", run.host)])
        client.update_run(self._id, status="RUNNING")
        return self._id

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [
            Metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, STATUS[status])
        self._id = None  # The next run, of another Trainer, is another one.

    def _new_run(self, name: str | None) -> str:
        experiment = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if known is None else known.experiment_id
        )
        return str(self._client.create_run(number, run_name=name).info.run_id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested dicts, with names such as "optimizer.config.momentum"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
