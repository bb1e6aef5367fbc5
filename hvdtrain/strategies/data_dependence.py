"""Find branches of a training step that depend on values of a worker's own examples.

A step that skips a batch with a large loss, or clips a large gradient, may add up on the few examples that the probe
tries, but not on later ones: each worker decides by its own part of the batch. Such a decision is an operation in the
step's graph; it is looked for while the first step is traced, from the gradients back to the data. Decisions inside
Keras's layers are assumed to be correct.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.models import gradients_of_all_taken
from hvdtrain.keras_internals.variables import tf_variable
from hvdtrain.strategies.reduced_gradients import refuse_reduced

LIMITS = ("Minimum", "Maximum", "ClipByValue")
"""Operations whose result is one of their inputs."""
FORMS = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
"""Operations whose result does not depend on the values of their inputs."""
BODIES = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}
"""Operations that run other graphs, and the attributes that name those."""
BRANCHES = ("If", "StatelessIf")
"""Of these, the ones whose first input selects the graph to run."""
PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
"""Operations that sum over examples, although their inputs may have the shape of their result."""

_TENSORFLOW = Path(tf.__file__).parent
_KERAS = Path(keras.__file__).parent
_OPERATIONS_OF_KERAS = tuple(_KERAS / "src" / name for name in ("ops", "backend", "utils"))
_OURS = Path(hvdtrain.__file__).parent

Names = set[str]
"""Names of tensors of one graph."""


def with_decision_warnings(
    model: keras.Model, step: Callable[[Any], Any], tell: Callable[[str], None]
) -> Callable[[Any], Any]:
    """Wrap `step` so that tracing it passes a warning about its first decision, if any, to `tell`.

    `tell` is called once for each application of gradients that depends on a decision. Only the first trace is
    examined: in a later one a share may have one example, whose values look like those of a whole batch.

    Raises:
        UsageError: While tracing: the step applies gradients or not depending on such a decision, so that some workers
            would wait for others; or it has reduced them itself.
    """
    traced = False

    def look(pairs: list[tuple[Any, Any]]) -> bool:
        refuse_reduced(model, pairs)
        where = first_decision([g for g, _ in pairs if g is not None], _own_state(model))
        if where:
            tell(_text(model, where))
        return False  # The optimizer applies them.

    def watched(data: Any) -> Any:
        nonlocal traced
        if traced or tf.executing_eagerly():  # Eager execution has no graph.
            return step(data)
        with gradients_of_all_taken(model, look):
            logs = step(data)
        if where := first_divergent_collective(tf.compat.v1.get_default_graph(), _own_state(model)):
            raise UsageError(_parting(model, where))
        traced = True
        return logs

    return watched


def first_decision(gradients: Sequence[Any], own_state: Iterable[tf.Variable] = ()) -> str:
    """Return the line of code of the first decision on the way to `gradients`, such as "train.py:41: the code", or "".

    Args:
        gradients: Tensors, IndexedSlices, or variables that hold gradients.
        own_state: Variables whose values differ between workers.
    """
    known = _handles(own_state)
    dense = [g for g in gradients if tf.is_symbolic_tensor(g)]
    # The slices of a lookup belong to single examples, so no sum over examples lies behind them.
    slices = [g.values for g in gradients if isinstance(g, tf.IndexedSlices)]
    waiting = [*dense, *(values for values in slices if tf.is_symbolic_tensor(values))]
    while waiting:
        graph = waiting[0].graph
        values = [value for value in waiting if value.graph is graph]
        reduced = [gradient for gradient in dense if gradient.graph is graph]
        if line := _first(values, reduced, _own(graph, _fed(graph, known))):
            return line
        # A branch that applies gradients captures them from the outer graph.
        outside = {n: t for n, t in _captured(graph).items() if tf.is_symbolic_tensor(t)}
        dense += [outside[name] for name in _behind(reduced) & outside.keys()]
        waiting = [value for value in waiting if value.graph is not graph]
        waiting += [outside[name] for name in _ancestors(values) & outside.keys()]
    return ""


def first_divergent_collective(graph: Any, own_state: Iterable[tf.Variable] = ()) -> str:
    """Return the line of code where `graph` first communicates depending on a worker's own values, or ""."""
    return _first_parting(graph, _own(graph, _fed(graph, _handles(own_state))))


def _first_parting(graph: Any, own: Names) -> str:
    for op in graph.get_operations():
        bodies = bodies_of(op)
        parts = op.type in BRANCHES and op.inputs[0].name in own
        if parts and any(_communicates(body) for body, _ in bodies):
            return _line_of_user(op)
        for body, inputs in bodies:
            if line := _first_parting(body, _own(body, _passed(inputs, body, own))):
                return line
    return ""


def _communicates(graph: Any) -> bool:
    return any(
        op.type.startswith("Horovod") or any(_communicates(body) for body, _ in bodies_of(op))
        for op in graph.get_operations()
    )


def _own_state(model: keras.Model) -> list[tf.Variable]:
    return [tf_variable(v) for metric in metrics_of(model) for v in metric.variables]


def _handles(variables: Iterable[tf.Variable]) -> set[int]:
    return {id(variable.handle) for variable in variables}


def _captured(graph: Any) -> dict[str, Any]:
    """Return the tensors that a graph captures, by their names inside it."""
    return {inside.name: outside for outside, inside in getattr(graph, "captures", ())}


def _fed(graph: Any, known: set[int]) -> Names:
    """Return the inputs of a graph whose values differ between workers: its arguments, and variables in `known`."""
    # Values computed before tracing, and all other variables, are the same on all workers.
    captured = _captured(graph)
    outer: dict[int, Names] = {}
    found: Names = set()
    for op in graph.get_operations():
        if op.type != "Placeholder":
            continue
        tensor = op.outputs[0]
        outside = captured.get(tensor.name)
        if outside is None:
            own = tensor.dtype != tf.resource
        elif not tf.is_symbolic_tensor(outside):
            own = id(outside) in known
        else:
            around = outside.graph
            if id(around) not in outer:
                outer[id(around)] = _own(around, _fed(around, known))
            own = outside.name in outer[id(around)]
        if own:
            found.add(tensor.name)
    return found


def _own(graph: Any, fed: Names) -> Names:
    """Return the tensors that depend on `fed` and so may differ between workers."""
    found = set(fed)
    for op in graph.get_operations():
        # The results of Horovod's operations are the same on all workers.
        if op.type in FORMS or op.type.startswith("Horovod"):
            continue
        if not any(tensor.name in found for tensor in op.inputs):
            continue
        bodies = bodies_of(op)
        if not bodies or (op.type in BRANCHES and op.inputs[0].name in found):
            found.update(tensor.name for tensor in op.outputs)
        for body, inputs in bodies:
            inner = _own(body, _passed(inputs, body, found))
            results = zip(op.outputs, body.outputs, strict=False)
            found.update(tensor.name for tensor, inside in results if inside.name in inner)
    return found


def bodies_of(op: tf.Operation) -> list[tuple[Any, Sequence[tf.Tensor]]]:
    """Return the graphs that `op` runs, each with its inputs."""
    inputs = op.inputs[1:] if op.type in BRANCHES else op.inputs
    names = [op.get_attr(attribute).name for attribute in BODIES.get(op.type, ())]
    # Functions of a loaded model may be unknown here.
    known = [function for name in names if (function := op.graph._get_function(name))]
    return [(function.graph, inputs) for function in known]


def _passed(inputs: Sequence[tf.Tensor], body: Any, names: Names) -> Names:
    """Return the names inside `body` of those `inputs` whose names are in `names`."""
    pairs = zip(inputs, body.inputs, strict=False)
    return {inside.name for given, inside in pairs if given.name in names}


def _first(values: Sequence[tf.Tensor], reduced: Sequence[tf.Tensor], own: Names) -> str:
    """Return the line of the first decision within one graph; see `first_decision`.

    Args:
        values: Tensors that lead to gradients.
        reduced: Those of them that are sums over examples.
        own: Tensors that differ between workers.
    """
    needed = _ancestors(values)
    behind = _behind(reduced)
    for op in values[0].graph.get_operations():  # In the order of the code.
        used = [tensor for tensor in op.outputs if tensor.name in needed]
        if not used or not any(tensor.name in own for tensor in used):
            continue
        for body, inputs in bodies_of(op):
            inner = [body.outputs[tensor.value_index] for tensor in used]
            sums = [body.outputs[t.value_index] for t in used if t.name in behind]
            if line := _first(inner, sums, _own(body, _passed(inputs, body, own))):
                return line
        alone = used[0].shape.num_elements() == 1 or used[0].name in behind
        if alone and _decides(op) and (line := _line_of_user(op)):
            return line
    return ""


def _decides(op: tf.Operation) -> bool:
    if op.type in LIMITS:
        return op.outputs[0].dtype.is_floating  # Integers are positions and lengths.
    # The inputs of a body were decided outside it.
    return op.outputs[0].dtype == tf.bool and op.type != "Placeholder"


def _ancestors(values: Iterable[tf.Tensor]) -> Names:
    found: Names = set()
    waiting = list(values)
    while waiting:
        tensor = waiting.pop()
        if tensor.name not in found:
            found.add(tensor.name)
            waiting += tensor.op.inputs
    return found


def _behind(reduced: Iterable[tf.Tensor]) -> Names:
    """Return the tensors between the sum over the examples and `reduced`."""
    found: Names = set()
    waiting = list(reduced)
    while waiting:
        tensor = waiting.pop()
        if tensor.name in found:
            continue
        found.add(tensor.name)
        alike = [given for given in tensor.op.inputs if given.shape == tensor.shape]
        others = [given for given in tensor.op.inputs if given.shape != tensor.shape]
        single = all(given.shape.num_elements() == 1 for given in others)
        if single and tensor.shape.is_fully_defined() and tensor.op.type not in PRODUCTS:
            waiting += alike
    return found


def _line_of_user(op: tf.Operation) -> str:
    """Return the line of code that made `op`, or "" if that is in Keras or hvdtrain."""
    for frame in reversed(op.traceback or ()):
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
        f"The training step of {type(model).__name__} branches on values of a worker's own part "
        f"of the batch, at {where!r}. One worker would branch on the whole batch; here each worker branches "
        "independently, so the result depends on the number of workers"
    )


def _parting(model: keras.Model, where: str) -> str:
    return (
        f"The training step of {type(model).__name__} applies gradients or not depending on "
        f"values of a worker's own part of the batch, at {where!r}: if workers branch differently, some would wait "
        "for the others. Branch on a value that all workers share, hvdtrain.keras.allreduce(number), or multiply the "
        "gradients by 0"
    )
