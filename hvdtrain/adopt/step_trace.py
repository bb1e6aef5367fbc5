"""A training step of a script, a tf.function, traced once more: with its gradients reduced, and its results merged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import op_def_registry

from hvdtrain.collectives.communicator import ALL_RANKS, Average, Sum
from hvdtrain.collectives.reduction import GradientReducer, Reduction
from hvdtrain.collectives.tensor_names import variables_name
from hvdtrain.data.tf_data_graph import DRAWING, nodes_of
from hvdtrain.errors import UsageError
from hvdtrain.strategies.data_dependence import bodies_of

OPS = {"mean": Average, "sum": Sum}
_KNOWN_STATE = (
    "Read",
    "Assign",
    "Resource",
    "VarIsInitialized",
    "StatefulPartitionedCall",
    "PartitionedCall",
    "If",
    "While",
    "Case",
    "Assert",
    "Horovod",
    "CudnnRNN",
)
"""Beginnings of the names of stateful operations that change nothing but variables."""


@dataclass
class Tracing:
    """What `gradient` of a tape in a step does with gradients of variables.

    Attributes:
        reducer: Reduces them over the ranks; None leaves them as they are.
        gradients: Those found so far, reduced.
    """

    reducer: GradientReducer | None = None
    gradients: list[tf.Tensor] = field(default_factory=list)

    def of(self, gradients: Any, sources: Any) -> Any:
        """Return `gradients`, those of variables reduced."""
        flat, found = tf.nest.flatten(sources), tf.nest.flatten(gradients)
        places = [place for place, source in enumerate(flat) if is_variable(source)]
        mine = [found[place] for place in places]
        if self.reducer is not None:
            mine = self.reducer(mine, [flat[place] for place in places])
        for place, gradient in zip(places, mine, strict=True):
            found[place] = gradient
            if gradient is not None:
                self.gradients.append(tf.convert_to_tensor(gradient))
        return tf.nest.pack_sequence_as(sources, found)


def is_variable(source: Any) -> bool:
    """Whether a source of a tape is a variable, and not a tensor that it watches."""
    return isinstance(source, tf.Variable | keras.Variable)


def traced(
    function: Function, context: Callable[[Tracing], contextlib.AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return a function that makes tf.functions like `function`.

    Its arguments are "mean" or "sum", by which the ranks' gradients are reduced ("": each keeps its own), and what runs
    the step and returns what takes the place of its result. Without the latter, the tf.function returns the result and
    the gradients.

    Args:
        function: The step.
        context: In which the tapes of the step ask a Tracing for their gradients.
    """
    # As tf.function converts it.
    step = tf.__internal__.autograph.tf_convert(
        function.python_function, tf.__internal__.autograph.control_status_ctx()
    )

    def make(reduction: str = "", merge: Callable[[Callable[[], Any]], Any] | None = None) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            reducer = None
            if reduction:
                options = Reduction(name="adopted_step", op=OPS[reduction])
                reducer = GradientReducer(options, variables_name)
            tracing = Tracing(reducer)
            with context(tracing):
                if merge is not None:
                    return merge(lambda: step(*args, **kwargs))
                return step(*args, **kwargs), tracing.gradients

        return tf.function(run, autograph=False)

    return make


def captured(function: Any) -> list[Any]:
    """Return the handles of the variables that a traced step may change.

    Raises:
        UsageError: It draws random numbers, or has effects that a second run would repeat.
    """
    graph = function.graph
    for name in sorted({node.op for node in nodes_of(graph)}):
        if name in DRAWING or "Random" in name:
            raise UsageError("it draws random numbers")
        known = op_def_registry.get(name)
        if known is not None and known.is_stateful and not name.startswith(_KNOWN_STATE):
            raise UsageError(f"it runs {name}, which may change more than variables")
    found = []
    for handle, inside in graph.captures:
        if handle.dtype != tf.resource:
            continue
        if not getattr(handle, "_handle_data", None):
            raise UsageError("it reads from an iterator or a table")
        if _is_written(inside):
            found.append(handle)
    return found


def _is_written(variable: tf.Tensor) -> bool:
    """Whether operations of the graph, or of functions that it calls, may change a variable."""
    for use in variable.consumers():
        if use.type.startswith(("Read", "ResourceGather")):
            continue
        bodies = bodies_of(use)
        inside = [
            inner
            for body, given in bodies
            for outer, inner in zip(given, body.inputs, strict=False)
            if outer is variable
        ]
        if not bodies or any(map(_is_written, inside)):
            return True
    return False


def read(handle: Any) -> tf.Tensor:
    """Return the value of the variable."""
    dtype = tf.dtypes.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    return tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))


def write(handle: Any, value: Any) -> None:
    """Give the variable a value."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def merged(handles: Sequence[Any], states: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return a function that runs a step on a share, and makes of it the result of the whole batch. In a tf.function.

    Args:
        handles: Variables that the step may change.
        states: Rule of each.
        outputs: Rule of each result, flattened.
    """

    def merge(step: Callable[[], Any]) -> Any:
        # Their changes are merged: the mean of values that are equal would round them in every step.
        before = {
            place: read(handles[place]) for place, rule in enumerate(states) if rule != "same"
        }
        result = step()
        flat = tf.nest.flatten(result)
        results = [leaf for leaf in flat if leaf is not None]
        parts = {("state", p): read(handles[p]) - value for p, value in before.items()}
        rules = {("state", place): states[place] for place in before}
        for place, rule in enumerate(outputs):
            if rule != "same":
                rules["output", place] = rule
                parts["output", place] = results[place]
        together = _over_ranks(parts, rules)
        for (kind, place), value in together.items():
            if kind == "output":
                results[place] = value
            else:
                write(handles[place], before[place] + value)
        given = iter(results)
        return tf.nest.pack_sequence_as(
            result, [None if leaf is None else next(given) for leaf in flat]
        )

    return merge


def _over_ranks(parts: Mapping[Any, tf.Tensor], rules: Mapping[Any, str]) -> dict[Any, tf.Tensor]:
    """Return each part merged over the ranks, those of one rule and dtype in one collective."""
    found: dict[Any, tf.Tensor] = {}
    groups: dict[tuple[str, tf.DType], list[Any]] = {}
    for key, value in parts.items():
        if rules[key] == "rows":
            name = f"hvdtrain_adopted_rows_{key[1]}"
            found[key] = ALL_RANKS.allgather(value, name)
        else:
            groups.setdefault((rules[key], value.dtype), []).append(key)
    for (rule, dtype), keys in groups.items():
        name = f"hvdtrain_adopted_{rule}_{dtype.name}"
        values = ALL_RANKS.grouped_allreduce([parts[key] for key in keys], name, OPS[rule])
        found |= dict(zip(keys, values, strict=True))
    return found


def leaves_of(structure: Any) -> list[np.ndarray]:
    """Return the tensors of a result as arrays.

    Raises:
        UsageError: One is ragged or sparse.
    """
    leaves = [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        raise UsageError("it returns ragged or sparse tensors")
    return [leaf.numpy() for leaf in leaves]
