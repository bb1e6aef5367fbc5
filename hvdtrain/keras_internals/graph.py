"""The graph of a Keras model: its calls in order, and models of parts of it. Tested with Keras 3.15.

A Sequential or functional model is a graph of calls: a layer (or an operation of keras.ops) is called on
tensors and returns tensors. A layer that is called twice has two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src import tree
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.models.functional import Functional

Tensor = Any
"""A keras.KerasTensor: symbolic, compared by id()."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or operation.

    Attributes:
        operation: Layer or operation that is called.
        inputs: Tensors that it is called on.
        outputs: Tensors that it returns.
    """

    operation: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """Name of the layer or operation."""
        return str(self.operation.name)

    @property
    def variables(self) -> list[Any]:
        """Variables of the layer, including those of layers inside it and of its seed generators."""
        return list(getattr(self.operation, "variables", ()))


def functional_of(model: keras.Model) -> Functional | None:
    """Return the graph inside a functional or a built Sequential model; None if it has none."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def calls_of(functional: Functional) -> list[Call]:
    """Return the calls of a graph in topological order.

    The order is depth first from the outputs, an operation's first input first, so that related calls (a tower, a
    residual branch) stay together, and the calls usually come in the order of the code that built the model.
    """
    nodes = {node for level in functional._nodes_by_depth.values() for node in level}
    done: set[Any] = set()
    ordered: list[Call] = []
    waiting = [(_node_of(tensor), False) for tensor in reversed(functional.outputs)]
    while waiting:
        node, ready = waiting.pop()
        if node in done or node.is_input or node not in nodes:
            continue
        if ready:
            done.add(node)
            ordered.append(Call(node.operation, tuple(node.input_tensors), tuple(node.outputs)))
            continue
        waiting.append((node, True))
        waiting += [(_node_of(tensor), False) for tensor in reversed(node.input_tensors)]
    return ordered


def _node_of(tensor: Tensor) -> Any:
    history = tensor._keras_history
    return history.operation._inbound_nodes[history.node_index]


def part_of(
    whole: keras.Model, inputs: Sequence[Tensor], outputs: Sequence[Tensor], name: str
) -> keras.Model:
    """Return a model of the calls of `whole` from `inputs` to `outputs`, with the same layers."""
    histories = [tensor._keras_history for tensor in inputs]
    model = keras.Model(inputs=list(inputs), outputs=list(outputs), name=name)
    # The policy determines loss scaling. Not through the setter, which would quantize.
    model._dtype_policy = whole.dtype_policy
    # Keras has overwritten the history of these tensors; without it, `whole` could not be serialized.
    for tensor, history in zip(inputs, histories, strict=True):
        tensor._keras_history = history
    # The layers set the masks of the outputs, so the model must not compute or discard them.
    model.supports_masking = True
    model.compute_mask = lambda inputs, previous_mask: None
    return model


def like_outputs(functional: Functional, flat: Sequence[Any]) -> Any:
    """Return the list `flat` in the structure of the model's outputs."""
    packed = tree.pack_sequence_as(functional._outputs_struct, list(flat))
    return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


def flat_inputs(functional: Functional, x: Any) -> list[Any]:
    """Return a user's `x` as a flat list of the graph's inputs, converted to their dtypes and numbers of dimensions."""
    return list(functional._standardize_inputs(x))


def mask_of(tensor: Any) -> Any:
    """Return the padding mask of a symbolic or concrete tensor; None if it has none."""
    return get_keras_mask(tensor)


def give_mask(tensor: Any, mask: Any) -> None:
    """Set the padding mask of `tensor`."""
    set_keras_mask(tensor, mask)
