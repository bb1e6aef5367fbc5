"""Find where activations may stay split: from column layers through elementwise calls into row layers.

A column layer that leaves its output split saves two collectives, and the memory of the whole activation. That is
correct only if nothing treats the part as the whole, so the model's graphs are searched: a column layer whose output
reaches anything but elementwise calls and row layers gathers it. Calls in code (the `call` method of a layer or model)
cannot be analysed, so layers called there gather as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain.keras_internals.graph import Call, Functional, calls_of, functional_of
from hvdtrain.parallel.tensor.elementwise_calls import is_elementwise


@dataclass(frozen=True)
class Graph:
    """The calls of a functional or Sequential model, in topological order, and the model's outputs."""

    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]


def graph_of(model: Any) -> Graph | None:
    """Return the graph that `model` runs; None for a layer, and for a model with a `call` method of its own."""
    functional = functional_of(model) if isinstance(model, keras.Model) else None
    if functional is None:
        return None
    if type(model).call not in (keras.Sequential.call, Functional.call):
        return None
    return Graph(tuple(calls_of(functional)), tuple(functional.outputs))


@dataclass(frozen=True)
class Flow:
    """The layers that split activations pass through, by id.

    Attributes:
        open_columns: Column layers that do not gather their output.
        split_rows: Row layers whose input is split.
        between: Elementwise layers whose input and output are split.
    """

    open_columns: frozenset[int]
    split_rows: frozenset[int]
    between: frozenset[int]


def find_flow(
    graphs: Sequence[Graph],
    columns: Mapping[int, Any],
    rows: Mapping[int, Any],
    in_code: Set[int] = frozenset(),
) -> Flow:
    """Return the largest correct flow of split activations.

    Args:
        graphs: Graphs of the model and of the models in it.
        columns: Column layers whose output may stay split, by id; called in these graphs only.
        rows: Row layers, by id; called in these graphs only.
        in_code: Ids of layers that are also called elsewhere.
    """
    open_columns = set(columns)
    while True:
        sources, touched, whole = _trace(graphs, open_columns)
        wrong = _wrong(graphs, sources, touched & (whole | in_code), rows)
        if not wrong:
            break
        open_columns -= wrong
    return Flow(
        frozenset(open_columns),
        frozenset(touched & set(rows)),
        frozenset(touched - set(rows)),
    )


def _trace(
    graphs: Sequence[Graph], open_columns: set[int]
) -> tuple[dict[int, frozenset[int]], set[int], set[int]]:
    """Return the column layers behind each split tensor, and the layers called with split and with whole tensors.

    All are given by id.
    """
    sources: dict[int, frozenset[int]] = {}
    touched: set[int] = set()
    whole: set[int] = set()
    for graph in graphs:
        for call in graph.calls:
            behind = [sources[id(tensor)] for tensor in call.inputs if id(tensor) in sources]
            if behind:
                touched.add(id(call.operation))
            if len(behind) < len(call.inputs):
                whole.add(id(call.operation))
            made: frozenset[int] = frozenset()
            if id(call.operation) in open_columns:
                made = frozenset([id(call.operation)])
            elif behind and is_elementwise(call.operation):
                made = frozenset().union(*behind)
            if made:
                sources |= {id(tensor): made for tensor in call.outputs}
    return sources, touched, whole


def _wrong(
    graphs: Sequence[Graph],
    sources: Mapping[int, frozenset[int]],
    mixed: Set[int],
    rows: Mapping[int, Any],
) -> set[int]:
    """Return the column layers whose parts would be treated as the whole somewhere.

    Args:
        mixed: Ids of layers that take parts in one call and wholes, perhaps, in another.
    """
    wrong: set[int] = set()
    for graph in graphs:
        wrong |= {s for tensor in graph.outputs for s in sources.get(id(tensor), ())}
        for call in graph.calls:
            behind = {s for tensor in call.inputs for s in sources.get(id(tensor), ())}
            fits = id(call.operation) in rows or (
                is_elementwise(call.operation)
                and len({len(tensor.shape) for tensor in call.inputs}) == 1
            )
            if id(call.operation) in mixed or not fits:
                wrong |= behind
    return wrong
