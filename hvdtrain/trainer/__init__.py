"""The Trainer: trains and evaluates a Keras model, and predicts with it, on all workers."""

from hvdtrain.trainer.trainer import Trainer

__all__ = ["Trainer"]
