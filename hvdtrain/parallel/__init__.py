"""Models and optimizer state divided over ranks, by means of Horovod's process sets.

`ShardedOptimizer` is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.parallel.zero import ShardedOptimizer

__all__ = ["ShardedOptimizer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hvdtrain.parallel.zero"), name)
    raise AttributeError(f"module 'hvdtrain.parallel' has no attribute {name!r}")
