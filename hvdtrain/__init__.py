"""hvdtrain: multi-worker training for TensorFlow and Keras 3, on Horovod.

`hvdtrain.init` makes a process a rank, and `hvdtrain.Trainer` trains a Keras model on all workers. `hvdtrain.keras` is
Horovod's Keras module for Keras 3, `hvdtrain.data` reads each rank's share of files, and `hvdtrain.launch` runs a
function on several ranks. Names are imported on first use, because the launcher imports this package and must not load
TensorFlow.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # Type checkers take it as true. Importing `typing` would slow the start of every command.
if TYPE_CHECKING:
    from typing import Any

    from hvdtrain.checkpoint.fit_callback import CheckpointCallback
    from hvdtrain.checkpoint.manager import CheckpointManager
    from hvdtrain.checkpoint.save_schedule import Checkpoints
    from hvdtrain.collectives.first_rank import first_rank_first
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.errors import (
        DivergedError,
        EngineError,
        HvdtrainError,
        LaunchError,
        Preempted,
        ReplicaError,
        UsageError,
    )
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.runtime import Rank, init, shutdown
    from hvdtrain.strategies.round_plan import DiLoCo, LocalSGD
    from hvdtrain.trainer import Trainer
    from hvdtrain.worker.heartbeat import long_phase

__version__ = "0.1.0"

__all__ = [
    "CheckpointCallback",
    "CheckpointManager",
    "Checkpoints",
    "DiLoCo",
    "DivergedError",
    "EngineError",
    "HvdtrainError",
    "LaunchError",
    "Layout",
    "LocalSGD",
    "Mesh",
    "Preempted",
    "Rank",
    "ReplicaError",
    "Trainer",
    "UsageError",
    "first_rank_first",
    "init",
    "long_phase",
    "shutdown",
]

SUBMODULES = ("data", "keras", "launch", "trackers")

_MODULE_OF_NAME = {
    "Trainer": "hvdtrain.trainer",
    "CheckpointCallback": "hvdtrain.checkpoint.fit_callback",
    "CheckpointManager": "hvdtrain.checkpoint.manager",
    "Checkpoints": "hvdtrain.checkpoint.save_schedule",
    "Layout": "hvdtrain.parallel.layout",
    "LocalSGD": "hvdtrain.strategies.round_plan",
    "DiLoCo": "hvdtrain.strategies.round_plan",
    "Mesh": "hvdtrain.collectives.mesh",
    "Rank": "hvdtrain.runtime",
    "first_rank_first": "hvdtrain.collectives.first_rank",
    "init": "hvdtrain.runtime",
    "long_phase": "hvdtrain.worker.heartbeat",
    "shutdown": "hvdtrain.runtime",
    "DivergedError": "hvdtrain.errors",
    "EngineError": "hvdtrain.errors",
    "HvdtrainError": "hvdtrain.errors",
    "LaunchError": "hvdtrain.errors",
    "Preempted": "hvdtrain.errors",
    "ReplicaError": "hvdtrain.errors",
    "UsageError": "hvdtrain.errors",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF_NAME:
        return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    if name in SUBMODULES:
        return importlib.import_module(f"hvdtrain.{name}")
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *SUBMODULES])
