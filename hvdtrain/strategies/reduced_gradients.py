"""Refuse a train_step that reduces its gradients over the ranks itself, before it passes them to the optimizer.

The Trainer sums gradients weighted by the ranks' shares of the batch. An average that the step has made before, with
`hvd.allreduce` or a DistributedGradientTape, is not weighted, and it is that of one process only if all shares are
equal. Such gradients are found while the step is traced: between a collective and the optimizer there is nothing but
operations on single elements and on shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError

PASSING = (
    *("Identity", "IdentityN", "Cast", "EnsureShape", "Reshape", "Squeeze", "ExpandDims"),
    *("Mul", "MulNoNan", "RealDiv", "Slice", "StridedSlice", "Split", "SplitV"),
)
"""Operations after which a reduced gradient is still one."""


def refuse_reduced(model: keras.Model, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Raise UsageError if one of the (gradient, variable) pairs that a step of `model` applies is reduced already."""
    if any(is_reduced(gradient) for gradient, _ in pairs):
        raise UsageError(
            f"The train_step of {type(model).__name__} reduces its gradients over the workers itself (allreduce, "
            "DistributedGradientTape, or a weight that its loss reads through a collective), without regard to their "
            "shares of the batch. The Trainer reduces them: let the step pass the gradients of a plain tf.GradientTape "
            "to the optimizer, or train with hvdtrain.keras and model.fit"
        )


def is_reduced(gradient: Any) -> bool:
    """Return whether a gradient is the result of one of Horovod's collectives; False for one with a value.

    Also False for IndexedSlices: their values may come from a collective behind the lookup, as in a loss that gathers.
    """
    tensor = gradient
    while tf.is_symbolic_tensor(tensor):
        op = tensor.op
        if op.type.startswith("Horovod"):
            return True
        floating = [given for given in op.inputs if given.dtype.is_floating]
        if op.type not in PASSING or not floating:
            return False
        if op.type == "IdentityN":
            tensor = op.inputs[tensor.value_index]
        else:  # Of a tensor and its factor, the larger one.
            tensor = max(floating, key=lambda given: given.shape.num_elements() or 0)
    return False
