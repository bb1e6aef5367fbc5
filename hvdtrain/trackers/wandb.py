"""Weights & Biases, in the cloud, on a server, or offline."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from hvdtrain.trackers.tracker import RunFacts, require_package


class WandB:
    """Tracks a run with Weights & Biases: values in its history, settings in its config.

    The x-axis is "step". An interrupted run is marked as preempted.

    Args:
        options: Arguments of wandb.init, such as project, name, group or mode="offline". By default `name` is that of
            the run_dir, `dir` is the run_dir, and `settings` leave out the command line and what it prints.

    Raises:
        UsageError: If wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        require_package("wandb", "WandB")
        self._options = options
        self._run: Any = None

    def start(self, run: RunFacts) -> str:
        import wandb

        # Output is kept by `hvdtrain run`, and may hold secrets, as may the command line (in "meta").
        settings = {"console": "off", "x_disable_meta": True}
        defaults = {"name": run.name, "dir": run.run_dir, "settings": settings}
        chosen = {"id": run.id or secrets.token_hex(4), "resume": "allow", **self._options}
        self._run = wandb.init(**defaults | chosen)
        # Not wandb's own step, which never goes back: a run that was killed repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.config.update({**run.config, "host": run.host}, allow_val_change=True)
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def end(self, status: str) -> None:
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
