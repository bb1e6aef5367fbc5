"""The Trainer: a Keras model, trained, evaluated and asked for predictions on all workers."""

from hvdtrain.trainer.trainer import Trainer

__all__ = ["Trainer"]
