"""Strategies: ways to run a training step on all workers. Horovod is the default; the others use tf.distribute."""

from hvdtrain.strategies.strategy import Steps, Strategy

__all__ = ["Steps", "Strategy"]
