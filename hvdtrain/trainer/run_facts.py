"""What of a run must be the same when it continues from a checkpoint, and what may change with its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.checkpoint.state import own_variables
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import alike
from hvdtrain.data import KnownSource, OwnSource, Source
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.trainer.setup import source_facts

CONFIG = (
    "optimizer",
    "global_batch_size",
    "learning_rate",
    "learning_rate_scaling",
    "precision",
    "seed",
    "steps_per_execution",
    "sync",
    "warmup_epochs",
)
"""What of the Trainer's arguments the course of a training depends on."""


def facts_of(
    config: Mapping[str, Any],
    source: Source,
    validation: Source | None,
    model: keras.Model,
    callbacks: Sequence[Any],
) -> dict[str, Any]:
    """Return what of a fit matters when it is resumed, by names for messages.

    Returns:
        "run": what must be the same. "ranks": how they are arranged. "own": what must be the same, too, where that is.

    Raises:
        UsageError: a fit that cannot be resumed exactly.
    """
    for what, data in (("training", source), ("validation", validation)):
        if data is not None and data.unrepeatable:
            raise UsageError(
                f"checkpoints needs {what} data that comes in the same order when the script runs again, but "
                f"{data.unrepeatable}. Or leave checkpoints out, and use keras.callbacks.ModelCheckpoint"
            )
    if len(optimizers_of(model)) > 1:
        raise UsageError("checkpoints works with one optimizer, and the model has several")
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UsageError("checkpoints do what BackupAndRestore does: leave BackupAndRestore out")
    reading = source.reading
    run = {
        **{name: config[name] for name in CONFIG},
        "the number of workers, among which the script divides the data": ALL_RANKS.size()
        if isinstance(source, OwnSource)
        else None,
        "shuffle": reading.shuffle,
        "class_weight": None
        if reading.class_weight is None
        else sorted(reading.class_weight.items()),
        **source_facts(source),
        "the training data": source.sample() if isinstance(source, KnownSource) else {},
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
    """Raise UsageError for the first of the facts that is not what it was; `path` is the run_dir."""
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
    """Raise UsageError for weights that a callback kept as they lay in another layout."""
    for name, state in callbacks.items():
        if isinstance(state, dict) and state.get("best_weights") is not None:
            raise UsageError(
                f"the checkpoints hold the best weights of the callback {name.partition(' ')[0]} in the layout of the "
                "earlier run: resume with that layout, or start a new run with ModelCheckpoint(save_best_only=True) "
                "instead of restore_best_weights"
            )


def _same(before: Any, now: Any) -> bool:
    """Whether two facts are; sums over the data differ in rounding between machines."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(alike(before[k], now[k]) for k in before)
    return before == now
