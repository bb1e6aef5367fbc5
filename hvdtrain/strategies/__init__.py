"""Ways to run a training step on all workers. Horovod's is the default; tf.distribute serves where it has none."""

from hvdtrain.strategies.strategy import Steps, Strategy

__all__ = ["Steps", "Strategy"]
