"""Checkpoints: the state of a training in files that are complete or absent, and how often they are written."""

from hvdtrain.checkpoint.fit_callback import CheckpointCallback
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.save_schedule import Checkpoints

__all__ = ["CheckpointCallback", "CheckpointManager", "Checkpoints"]
