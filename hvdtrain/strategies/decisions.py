"""Decisions: does a step choose between two ways by numbers of a worker's own examples?

A step that leaves out a batch whose loss is large, or clips a gradient that is, may add up on the few examples that
the probe tries, and not on those that come later: each worker decides by its own part of the batch. Such a choice
stands in the step's graph, where it is looked for while the first step is traced: from the gradients back to the data.
Choices that Keras's layers make are theirs to get right.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvdtrain
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import gradients_taken
from hvdtrain.keras_internals.variables import tf_variable

LIMITS = ("Minimum", "Maximum", "ClipByValue")
"""Operations whose result is one of their inputs."""
FORMS = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
"""Operations whose result does not depend on the values of their inputs."""
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
"""Operations that sum over examples, though their inputs may have the shape of their result."""

_TENSORFLOW = Path(tf.__file__).parent
_KERAS = Path(keras.__file__).parent
_OPERATIONS_OF_KERAS = tuple(_KERAS / "src" / name for name in ("ops", "backend", "utils"))
_OURS = Path(hvdtrain.__file__).parent


def telling_decisions(
    model: keras.Model, step: Callable[[Any], Any], tell: Callable[[str], None]
) -> Callable[[Any], Any]:
    """Return `step`, which while it is traced calls `tell` with what is to be said of its first decision, if any."""
    told: set[str] = set()

    def look(pairs: list[tuple[Any, Any]]) -> bool:
        where = first_decision([g for g, _ in pairs if g is not None], _own_state(model))
        if where and where not in told:
            told.add(where)
            tell(_text(model, where))
        return False  # The optimizer goes on to apply them.

    def watched(data: Any) -> Any:
        if tf.executing_eagerly():
            return step(data)  # There is no graph.
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_of(model):
                stack.enter_context(gradients_taken(optimizer, look))
            return step(data)

    return watched


def first_decision(gradients: Sequence[Any], own_state: Iterable[tf.Variable] = ()) -> str:
    """Return the line of code where the first decision on the way to `gradients` is made: "train.py:41: the code".

    Empty: there is none.

    Args:
        gradients: tensors or IndexedSlices of one graph.
        own_state: variables that each worker has for itself.
    """
    values = [getattr(gradient, "values", gradient) for gradient in gradients]
    if not values:
        return ""
    graph = values[0].graph
    # What was computed before tracing is the same on all workers, and so are their variables.
    captured = {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
    known = {id(variable.handle) for variable in own_state}
    fed = set()
    for op in graph.get_operations():
        if op.type == "Placeholder":
            outside = captured.get(id(op.outputs[0]))
            alike = isinstance(outside, tf.__internal__.EagerTensor)
            if id(outside) in known or not (alike or op.outputs[0].dtype == tf.resource):
                fed.add(op)
    return _first(values, fed)


def _own_state(model: keras.Model) -> list[tf.Variable]:
    return [tf_variable(v) for metric in metrics_of(model) for v in metric.variables]


def _first(values: Sequence[tf.Tensor], fed: set[tf.Operation]) -> str:
    """Return what `first_decision` does, of a graph in which each worker has its own `fed`."""
    graph = values[0].graph
    own = _depend_on(graph, fed)
    before = _ancestors(values)
    clipped = {op for value in values for op in _elementwise(value)}
    for op in graph.get_operations():  # In the order of the code.
        if op not in own or op not in before or not op.outputs:
            continue
        if op.type in CALLS:
            body = graph._get_function(op.get_attr("f").name).graph
            pairs = zip(op.inputs, body.inputs, strict=True)
            line = _first(body.outputs, {inside.op for given, inside in pairs if given.op in own})
        else:
            decides = op.outputs[0].dtype == tf.bool or op.type in LIMITS
            alone = op.outputs[0].shape.rank == 0 or op in clipped
            line = _line_of_user(op) if decides and alone else ""
        if line:
            return line
    return ""


def _depend_on(graph: Any, fed: set[tf.Operation]) -> set[tf.Operation]:
    """Return the operations whose results depend on `fed`, and are not the same on all workers."""
    found = set(fed)
    for op in graph.get_operations():
        # What Horovod returns, all workers have.
        if op.type in FORMS or op.type.startswith("Horovod"):
            continue
        if any(tensor.op in found for tensor in op.inputs):
            found.add(op)
    return found


def _ancestors(values: Iterable[tf.Tensor]) -> set[tf.Operation]:
    found: set[tf.Operation] = set()
    waiting = [value.op for value in values]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
    return found


def _elementwise(gradient: tf.Tensor) -> list[tf.Operation]:
    """Return the operations on the way to `gradient` that come behind the sum over the examples."""
    found: list[tf.Operation] = []
    waiting = [gradient.op]
    while waiting:
        op = waiting.pop()
        alike = all(t.shape.num_elements() == 1 or t.shape == gradient.shape for t in op.inputs)
        if op not in found and alike and op.type not in PRODUCTS:
            found.append(op)
            waiting += [tensor.op for tensor in op.inputs]
    return found


def _line_of_user(op: tf.Operation) -> str:
    """Return where the code stands that made `op`; empty if it is Keras's or our own."""
    for frame in reversed(op.traceback):
        path = Path(frame.filename)
        if path.is_relative_to(_TENSORFLOW) or _is_under(path, _OPERATIONS_OF_KERAS):
            continue
        if _is_under(path, (_KERAS, _OURS)):
            return ""
        code = linecache.getline(frame.filename, frame.lineno).strip()
        return f"{path.name}:{frame.lineno}: {code}"
    return ""


def _is_under(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _text(model: keras.Model, where: str) -> str:
    return (
        f"The training step of {type(model).__name__} decides by numbers of a worker's own part of the batch, at "
        f"{where!r}. Where one worker would decide by the whole batch, each now decides for itself, and the result "
        "depends on their number"
    )
