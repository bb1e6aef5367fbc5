"""Experiment trackers: MLflow, TensorBoard and Weights & Biases, for `Trainer(trackers=...)`."""

from hvdtrain.trackers.mlflow import MLflow
from hvdtrain.trackers.tensorboard import TensorBoard
from hvdtrain.trackers.tracker import RunFacts, Tracker
from hvdtrain.trackers.wandb import WandB

__all__ = ["MLflow", "RunFacts", "TensorBoard", "Tracker", "WandB"]
