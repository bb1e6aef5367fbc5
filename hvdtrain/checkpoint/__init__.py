"""Checkpoints: files, complete or absent, with the state of a training, and when to write them."""

from hvdtrain.checkpoint.fit_callback import CheckpointCallback
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.save_schedule import Checkpoints

__all__ = ["CheckpointCallback", "CheckpointManager", "Checkpoints"]
