"""ZeRO stage 1: the optimizer's state in parts, one on each rank that holds the same variables."""

from hvdtrain.parallel.zero.optimizer import ShardedOptimizer
from hvdtrain.parallel.zero.state import gathered_state, scatter_state, state_names

__all__ = ["ShardedOptimizer", "gathered_state", "scatter_state", "state_names"]
