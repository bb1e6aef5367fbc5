"""Estimates the peak memory of a traced step in addition to its variables: activations, gradients, temporary values.

The graph is walked in the order of TensorFlow's executor: an operation runs when its inputs are ready, and a tensor
lives until its last consumer has run. Elementwise operations reuse the memory of an input that has no other consumer;
views of a tensor have no memory of their own. The step must be traced with static shapes.

Not included: the workspace of most kernels, and the allocator's rounding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

COLLECTIVE = "planned_collective"
"""Name of the operations that represent collectives in `hvdtrain estimate`; they have their own output memory, as
Horovod's do."""
VIEWS = {
    *("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "Bitcast", "EnsureShape"),
    *("PreventGradient", "ReadVariableOp", "CheckNumerics", "Snapshot", "NoOp", "Placeholder", "VarHandleOp"),
    *("Assert", "Shape", "Const", "PlaceholderWithDefault"),
}  # fmt: skip
"""Operations whose outputs share their inputs' memory, or are small."""
IN_PLACE = {
    *("Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "RealDiv", "DivNoNan", "Maximum", "Minimum", "Neg", "Square"),
    *("Sqrt", "Rsqrt", "Exp", "Log", "Log1p", "Pow", "Tanh", "TanhGrad", "Sigmoid", "SigmoidGrad", "Relu", "ReluGrad"),
    *("Relu6", "Relu6Grad", "Elu", "EluGrad", "Selu", "SeluGrad", "LeakyRelu", "LeakyReluGrad", "Erf", "BiasAdd"),
    *("Softmax", "LogSoftmax", "SquaredDifference", "Abs", "SelectV2", "Reciprocal", "Softplus", "SoftplusGrad"),
    *("RsqrtGrad", "SqrtGrad", "Floor", "Round", "ClipByValue", "ZerosLike", "OnesLike"),
}  # fmt: skip
"""Operations that reuse the memory of an input without other consumers."""

COSTLY = 2**14
"""Size in bytes of an operation's largest tensor above which the executor treats it as expensive."""


@dataclass
class _Buffer:
    """Memory of a tensor and its views.

    Attributes:
        size: Size in bytes.
        users: Number of consumers that have not run yet.
    """

    size: int
    users: int = 0


def peak_bytes(graph: Any) -> int:
    """Return the peak memory of the tensors in a tf.function's graph in bytes, without its inputs."""
    return _Walk(graph).peak


def count_operations(graph: Any) -> int:
    """Return the number of operations in a tf.function's graph, including those of its loops, branches and calls."""
    return sum(
        1 + sum(count_operations(inner) for inner in _functions(op))
        for op in graph.get_operations()
    )


def step_bytes(peak: int, gradients: int, micro_batches: int, in_memory: int) -> dict[str, int]:
    """Return the memory of a step by what takes it, in bytes.

    Args:
        peak: Peak memory of the graph of one micro-batch.
        gradients: Size of the gradients.
        micro_batches: Number of micro-batches of a share.
        in_memory: Number of micro-batches whose activations are in memory at once.
    """
    return {
        # The sum of those before is in memory, too.
        "gradients": min(gradients, peak) + (gradients if micro_batches > 1 else 0),
        "activations": max(0, peak - gradients) * in_memory,
    }


class _Walk:
    """Simulation of the executor on a graph.

    Attributes:
        peak: Peak memory of the graph's tensors in bytes.
    """

    def __init__(self, graph: Any) -> None:
        self.peak = 0
        self._now = 0
        self._buffers: dict[int, _Buffer] = {}
        operations = graph.get_operations()
        waits = {op: len(op.inputs) + len(op.control_inputs) for op in operations}
        followers: dict[Any, list[Any]] = {op: [] for op in operations}
        for op in operations:
            for tensor in op.inputs:
                followers[tensor.op].append(op)
            for before in op.control_inputs:
                followers[before].append(op)
        # As the executor on one thread: cheap operations run at once, in order; of expensive ones, the latest first.
        at_once = deque(op for op in operations if not waits[op])
        later: list[Any] = []
        while at_once or later:
            op = at_once.popleft() if at_once else later.pop()
            self._run(op)
            costly: list[Any] = []
            for after in followers[op]:
                waits[after] -= 1
                if not waits[after]:
                    (costly if _is_costly(after) else at_once).append(after)
            later += costly

    def _run(self, op: Any) -> None:
        inputs = [self._buffers[id(tensor)] for tensor in op.inputs]
        for place, tensor in enumerate(op.outputs):
            self._buffers[id(tensor)] = self._output(op, place, tensor, inputs)
            self._buffers[id(tensor)].users += len(tensor.consumers())
        self.peak = max(self.peak, self._now + _inside(op))
        for buffer in inputs:
            buffer.users -= 1
        for buffer in {id(b): b for b in [*inputs, *self._of(op.outputs)]}.values():
            if buffer.users == 0:
                self._now -= buffer.size
                buffer.size = 0

    def _of(self, tensors: Any) -> list[_Buffer]:
        return [self._buffers[id(tensor)] for tensor in tensors]

    def _output(self, op: Any, place: int, tensor: Any, inputs: list[_Buffer]) -> _Buffer:
        collective = COLLECTIVE in op.name
        if op.type in VIEWS and not collective:
            return inputs[min(place, len(inputs) - 1)] if inputs else _Buffer(0)
        size = _size(op, place, tensor)
        if op.type in IN_PLACE:
            for buffer in inputs:
                if buffer.users == 1 and buffer.size == size:
                    return buffer
        self._now += size
        return _Buffer(size)


def _is_costly(op: Any) -> bool:
    """Whether the executor passes the operation to its thread pool: it measures kernels, whose cost grows with size."""
    if op.type in VIEWS and COLLECTIVE not in op.name:
        return False
    return (
        max((_size(tensor.op, 0, tensor) for tensor in [*op.inputs, *op.outputs]), default=0)
        > COSTLY
    )


def _size(op: Any, place: int, tensor: Any) -> int:
    if tensor.dtype == tf.variant:
        return _list_bytes(op, place)
    elements = tensor.shape.num_elements()
    return 0 if elements is None or tensor.dtype == tf.resource else elements * tensor.dtype.size


def _list_bytes(op: Any, place: int) -> int:
    """Return the bytes of a TensorList output of a loop; 0 if an earlier list of the loop holds the same tensors."""
    if op.type not in ("While", "StatelessWhile"):
        return 0
    body = _function(op, "body")
    item = _item(body, place)
    if item is None or any(_item(body, before) is item for before in range(place)):
        return 0
    return (item.shape.num_elements() or 0) * item.dtype.size * _iterations(op)


def _item(body: Any, place: int) -> Any:
    """Return the tensor that each iteration of a loop adds to its list `place`; None if it takes no new memory."""
    made = _origin(body.outputs[place]).op
    if made.type not in ("TensorListPushBack", "TensorListSetItem"):
        return None
    item = _origin(made.inputs[-1])
    if item.op.type == "Placeholder":
        # Made by the iteration before, or the same in all iterations.
        number = next(n for n, tensor in enumerate(body.inputs) if tensor is item)
        before = _origin(body.outputs[number])
        if before is item:
            return None
        item = before
    return None if item.op.type in ("TensorListGetItem", "Const") else item


def _origin(tensor: Any) -> Any:
    """Return the tensor whose memory `tensor` is a view of."""
    while tensor.op.type in VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[min(tensor.value_index, len(tensor.op.inputs) - 1)]
    return tensor


def _iterations(op: Any) -> int:
    """Return the maximum number of iterations of a loop; 1 if it is not static."""
    limit = op.inputs[1]
    if limit.op.type == "Max":  # Keras's RNN loop: the maximum sequence length.
        limit = limit.op.inputs[0]
    value = tf.get_static_value(limit)
    return 1 if value is None or not value.size else max(1, int(value.max()))


def _inside(op: Any) -> int:
    """Return the temporary memory of an operation: the peak of its functions, or a kernel's known workspace."""
    if op.type == "MaxPoolGrad":  # A copy of the output, and the indices of the maxima as int64.
        return 3 * _size(op.inputs[1].op, 0, op.inputs[1])
    most = max(map(peak_bytes, _functions(op)), default=0)
    if op.type in ("While", "StatelessWhile"):
        # Up to so many iterations run at once, as their dependencies allow.
        return most * min(_iterations(op), op.get_attr("parallel_iterations"))
    return most


_BRANCHES = {
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
}


def _functions(op: Any) -> list[Any]:
    return [_function(op, name) for name in _BRANCHES.get(op.type, ())]


def _function(op: Any, attribute: str) -> Any:
    name = op.get_attr(attribute).name
    return op.graph._get_function(name).graph
