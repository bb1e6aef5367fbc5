"""ZeRO stage 1: optimizer state divided over the ranks that hold the same variables."""

from hvdtrain.parallel.zero.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
