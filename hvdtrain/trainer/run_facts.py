"""The facts about a run that must not change when it resumes from a checkpoint, and those that may."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.checkpoint.state import own_variables
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import alike
from hvdtrain.data import ShardedSource
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.rank_variables import is_elastic
from hvdtrain.trainer.plans import FitPlan
from hvdtrain.trainer.setup import samples_of, source_facts

CONFIG = (
    "optimizer",
    "global_batch_size",
    "learning_rate_scaling",
    "learning_rate",
    "precision",
    "seed",
    "steps_per_execution",
    "sync",
    "warmup_epochs",
)
"""Arguments of the Trainer on which the results of the training depend."""


def fit_facts(config: Mapping[str, Any], plan: FitPlan, model: keras.Model) -> dict[str, Any]:
    """Return the facts about a fit to compare when it resumes.

    Args:
        config: The Trainer's arguments, by name.
        plan: What the fit will do.
        model: Model with its optimizer and metrics.

    Returns:
        "run": facts that must be the same. "ranks": number and layout of the ranks, which may change. "own": facts that
        must be the same as long as "ranks" is. Names are those for messages.

    Raises:
        UsageError: If the fit could not be resumed exactly: the order of the data differs from process to process, the
            model has several optimizers, or none in compile, the learning rate depends on the number of workers of an
            elastic job, or BackupAndRestore is used.
    """
    source = plan.train
    for what, data in (("training", source), ("validation", plan.validation)):
        if data is not None and data.unrepeatable:
            raise UsageError(
                f"checkpoints needs {what} data that comes in the same order when the script runs again, but "
                f"{data.unrepeatable}. Or leave checkpoints out, and use keras.callbacks.ModelCheckpoint"
            )
    if len(optimizers_of(model)) > 1:
        raise UsageError("checkpoints works with one optimizer, and the model has several")
    if model.optimizer is None:
        raise UsageError(
            "checkpoints works with the optimizer of compile: pass the optimizer to it"
        )
    if config["learning_rate_scaling"] != "none" and is_elastic(os.environ):
        raise UsageError(
            "learning_rate_scaling depends on the number of workers, which changes in an elastic job: "
            "leave it out, and pass the learning rate to train with"
        )
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in plan.callbacks):
        raise UsageError("checkpoints replace BackupAndRestore: leave BackupAndRestore out")
    reading = source.reading
    run = {
        **{name: config[name] for name in CONFIG},
        "the number of workers, among which the script divides the data": ALL_RANKS.size()
        if isinstance(source, ShardedSource)
        else None,
        "shuffle": reading.shuffle,
        "class_weight": None
        if reading.class_weight is None
        else sorted(reading.class_weight.items()),
        **source_facts(source),
        "the training data": samples_of(source),
    }
    own = {
        "the metrics": [metric.name for metric in model.metrics],
        "the shapes of seeds, statistics and metrics": [
            list(variable.shape) for variable in own_variables(model)
        ],
    }
    arranged = ("layout", "shard_optimizer")
    ranks = {name: config[name] for name in arranged} | {"workers": ALL_RANKS.size()}
    return {"run": run, "ranks": ranks, "own": own}


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Check that the facts about a run have not changed.

    Args:
        before: Facts in the checkpoint.
        now: Facts of the present run.
        path: Path of the run_dir, for the message.

    Raises:
        UsageError: If a fact has changed; names the first one.
    """
    for name in {**before, **now}:
        if _same(before.get(name), now.get(name)):
            continue
        what = (
            name
            if isinstance(now.get(name), dict)
            else f"{name}: {before.get(name)!r} before, {now.get(name)!r} now"
        )
        raise UsageError(
            f"run_dir {path!r} has checkpoints of a run that differs from this one: {what}. "
            "Choose a new run_dir, or run the same script with the same arguments as before"
        )


def refuse_parts(callbacks: Mapping[str, Any]) -> None:
    """Raise UsageError if a callback's saved best weights are parts in another layout than the present one."""
    for name, state in callbacks.items():
        if isinstance(state, dict) and state.get("best_weights") is not None:
            raise UsageError(
                f"the checkpoints hold the best weights of the callback {name.partition(' ')[0]} in the layout of the "
                "earlier run: resume with that layout, or start a new run with ModelCheckpoint(save_best_only=True) "
                "instead of restore_best_weights"
            )


def _same(before: Any, now: Any) -> bool:
    """Whether two facts are equal; sums over the data may differ by rounding between machines."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(alike(before[k], now[k]) for k in before)
    return before == now
