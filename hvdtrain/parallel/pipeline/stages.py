"""Cut a Sequential or functional model into stages.

The calls of the model's graph are in one order (see keras_internals.graph.calls_of), and a stage is a run of them, so
data flows only towards later stages. A tensor made in one stage and used in a later one crosses all cuts between them,
so skip connections pass through. Model inputs are not sent, since every rank reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.graph import Call
from hvdtrain.keras_internals.models import overridden

_METHODS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
"""Methods of a model that need all of it in one process."""

SLACK = 1.05
"""Factor by which cuts may make the largest stage larger than necessary, if that reduces what crosses them."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses a cut.

    Attributes:
        tensor: Symbolic tensor.
        mask: Symbolic padding mask of it, or None.
    """

    tensor: Any
    mask: Any

    @property
    def masked(self) -> bool:
        """Whether a padding mask is sent with the tensor."""
        return self.mask is not None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient is sent back for the tensor."""
        return "float" in str(self.tensor.dtype)


@dataclass(frozen=True)
class Stage:
    """One stage of a model.

    Attributes:
        index, count: Index of the stage, from 0, and number of stages.
        model: Model of the stage's layers. Its inputs are the whole model's inputs that it uses, then `used`. An only
            stage is the whole model.
        own_inputs: Indices of the whole model's flat inputs that the stage uses.
        received: Tensors that cross the cut before the stage.
        used: Indices in `received` of the tensors that the stage's model takes.
        sent: Tensors that cross the cut after the stage.
        passed: For each of `sent`, or on the last stage for each of the whole model's outputs: its index in
            `received`, or None for an output of the stage's model, in order.
        others: Variables of the other stages.
        whole: Graph of the whole model.
        names: Names of the layers of each stage.
    """

    index: int
    count: int
    model: keras.Model
    own_inputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    used: tuple[int, ...]
    sent: tuple[Crossing, ...]
    passed: tuple[int | None, ...]
    others: tuple[Any, ...]
    whole: Any
    names: tuple[tuple[str, ...], ...]

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which returns the model's outputs."""
        return self.index == self.count - 1


def cut(model: keras.Model, index: int, count: int, begins: Sequence[str] | None = None) -> Stage:
    """Return stage `index` of the `count` stages of a model.

    Args:
        model: Functional or built Sequential model; may be without values (see keras_internals.deferred_variables).
        index: Index of the stage, from 0.
        count: Number of stages.
        begins: Names, or regular expressions for whole names, of the layers that begin the second and later stages;
            None: stages of about equal cost.

    Raises:
        UsageError: The model has no graph, a pattern fits no cut, a layer's weights are used in several stages, or a
            stage has no trainable weights.
    """
    functional = require_graph(model)
    calls = graph_internals.calls_of(functional)
    if count == 1:
        return _stage(model, functional, calls, [0] * len(calls), index, count)
    starts = (
        _balanced_starts(functional, calls, count)
        if begins is None
        else _named_starts(calls, begins)
    )
    stage_of = [sum(place >= start for start in starts) for place in range(len(calls))]
    _check_shared(calls, stage_of)
    _check_trained(calls, stage_of, count)
    return _stage(model, functional, calls, stage_of, index, count)


def balanced(
    costs: Sequence[float],
    stages: int,
    weights: Sequence[float] | None = None,
    forbidden: AbstractSet[int] = frozenset(),
) -> list[int]:
    """Return the indices at which the second and later stages begin.

    The cost of the largest stage is the smallest possible, within SLACK; among such divisions the one is returned
    whose cuts have the smallest sum of weights. Dynamic programming, O(stages * len(costs)^2).

    Args:
        costs: Cost of each call, in order.
        stages: Number of stages, at most len(costs).
        weights: For each call, the cost of a cut before it; None: 0.
        forbidden: Indices at which no stage may begin.

    Raises:
        ValueError: There are fewer possible cuts than `stages - 1`.
    """
    weights = [0.0] * len(costs) if weights is None else weights
    sums = [0.0, *accumulate(costs)]
    places = [p for p in range(1, len(costs)) if p not in forbidden]
    if len(places) < stages - 1:
        raise ValueError(f"{len(places)} places to cut at, {stages - 1} cuts")
    # Cost of the largest stage in the best division of costs[:end] into the stages so far.
    ends = [*places, len(costs)]
    largest = {end: sums[end] for end in ends}
    for _ in range(stages - 1):
        largest = {
            end: min(
                (max(largest[p], sums[end] - sums[p]) for p in places if p < end and p in largest),
                default=math.inf,
            )
            for end in ends
        }
    limit = largest[len(costs)] * SLACK
    crossing: dict[int, tuple[float, list[int]]] = {
        end: (0.0, []) for end in ends if sums[end] <= limit
    }
    for _ in range(stages - 1):
        crossing = {
            end: min(found)
            for end in ends
            if (
                found := [
                    (crossing[p][0] + weights[p], [*crossing[p][1], p])
                    for p in places
                    if p < end and p in crossing and sums[end] - sums[p] <= limit
                ]
            )
        }
    return crossing[len(costs)][1]


def require_graph(model: keras.Model) -> Any:
    """Return the graph of a model that can be cut; raise UsageError for other models."""
    functional = graph_internals.functional_of(model)
    if functional is None:
        what = (
            "it has no keras.layers.Input, so its shapes are unknown: add one at the start"
            if isinstance(model, keras.Sequential)
            else "it is a subclassed model, whose layers are known only to its call method: write it as "
            "keras.Sequential or keras.Model(inputs, outputs)"
        )
        raise UsageError(
            f"Pipeline stages and micro-batches need a model whose graph is known. Model {model.name!r}: {what}"
        )
    own = overridden(model, *_METHODS)
    if own is not None:
        raise UsageError(
            f"Pipeline stages and micro-batches: the model {model.name!r} overrides {own}, which needs the whole "
            "model and a whole share of the batch: leave it out, or train without them"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "hvdtrain_synchronized", False):
            raise UsageError(
                f"Micro-batches: layer {layer.name!r} ({type(layer).__name__}) synchronizes over ranks within a "
                "step, which micro-batches do not: use BatchNormalization or LayerNormalization"
            )
    return functional


def _balanced_starts(functional: Any, calls: Sequence[Call], count: int) -> list[int]:
    costs = [_cost(call, calls[:place]) for place, call in enumerate(calls)]
    forbidden = {
        place
        for variables in _places_of_variables(calls).values()
        for place in range(min(variables) + 1, max(variables) + 1)
    }
    # A stage without trainable weights has no gradients to reduce (see _check_trained).
    trained = [place for place, call in enumerate(calls) if _trains([call])] or [0]
    forbidden |= {*range(1, trained[0] + 1), *range(trained[-1] + 1, len(calls))}
    weights = [
        sum(_elements(t) for t in _crossing(functional, calls, place))
        for place in range(len(calls))
    ]
    try:
        return balanced(costs, count, weights, forbidden)
    except ValueError as error:
        raise UsageError(
            f"Pipeline stages: the model has too few layers to cut it into {count} stages ({error}): use a mesh with a "
            "smaller pipeline"
        ) from error


def _cost(call: Call, before: Sequence[Call]) -> float:
    """Return the number of weights (memory and work) plus activations per example (kept for the backward pass)."""
    if any(call.operation is other.operation for other in before):
        weights = 0
    else:
        weights = sum(math.prod(v.shape) for v in call.variables)
    return float(weights + sum(_elements(t) for t in call.outputs))


def _elements(tensor: Any) -> int:
    """Return the number of elements per example; an unknown dimension counts as 1."""
    return math.prod(d or 1 for d in tensor.shape[1:])


def _crossing(functional: Any, calls: Sequence[Call], place: int) -> list[Any]:
    """Return the tensors that calls[:place] make and that calls[place:] or the model's outputs use."""
    made = {id(t): t for call in calls[:place] for t in call.outputs}
    taken = {id(t) for call in calls[place:] for t in call.inputs}
    taken |= {id(t) for t in functional.outputs}
    return [t for key, t in made.items() if key in taken]


def _named_starts(calls: Sequence[Call], begins: Sequence[str]) -> list[int]:
    starts = []
    for pattern in begins:
        found = [p for p, call in enumerate(calls) if _fits(pattern, call.name)]
        layers = list(dict.fromkeys(calls[p].name for p in found))
        if len(layers) != 1:
            names = ", ".join(layers or dict.fromkeys(call.name for call in calls))
            has = "matches several layers" if layers else "matches no layer of the model"
            raise UsageError(f"Layout: stages: {pattern!r} {has}: {names}")
        starts.append(found[0])
    if starts != sorted(set(starts)) or 0 in starts:
        order = ", ".join(dict.fromkeys(call.name for call in calls))
        raise UsageError(
            f"Layout: stages={list(begins)!r}: name the layers in the model's order, and not its first one, with "
            f"which the first stage begins. The order is: {order}"
        )
    return starts


def _fits(pattern: str, name: str) -> bool:
    if pattern == name:
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UsageError(
            f"Layout: stages: {pattern!r} is neither a name nor a regular expression: {error}"
        ) from None


def _places_of_variables(calls: Sequence[Call]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        for variable in call.variables:
            places.setdefault(id(variable), []).append(place)
    return places


def _check_shared(calls: Sequence[Call], stage_of: Sequence[int]) -> None:
    for places in _places_of_variables(calls).values():
        stages = sorted({stage_of[p] for p in places})
        if len(stages) > 1:
            names = " and ".join(dict.fromkeys(repr(calls[p].name) for p in places))
            raise UsageError(
                f"Pipeline stages: the weights of layer {names} are used in stages {', '.join(map(str, stages))}: cut "
                "the model so that one stage has all their uses, or give each use its own layer"
            )


def _trains(calls: Sequence[Call]) -> bool:
    return any(getattr(call.operation, "trainable_variables", ()) for call in calls)


def _check_trained(calls: Sequence[Call], stage_of: Sequence[int], count: int) -> None:
    for stage in range(count):
        own = [call for call, of in zip(calls, stage_of, strict=True) if of == stage]
        if not _trains(own):
            raise UsageError(
                f"Pipeline stages: stage {stage} ({', '.join(call.name for call in own)}) has no weights to train: cut "
                "the model elsewhere (Layout(stages=...))"
            )


def _stage(
    whole: keras.Model,
    functional: Any,
    calls: Sequence[Call],
    stage_of: Sequence[int],
    index: int,
    count: int,
) -> Stage:
    starts = [stage_of.index(stage) for stage in range(count)]
    ends = [*starts[1:], len(calls)]
    own = calls[starts[index] : ends[index]]
    received = _crossing(functional, calls, starts[index]) if index else []
    is_last = index == count - 1
    sent = [] if is_last else _crossing(functional, calls, ends[index])
    taken = {id(t) for call in own for t in call.inputs}
    own_inputs = tuple(i for i, t in enumerate(functional.inputs) if id(t) in taken)
    used = tuple(i for i, t in enumerate(received) if id(t) in taken)
    inputs = [*(functional.inputs[i] for i in own_inputs), *(received[i] for i in used)]
    places = {id(t): i for i, t in enumerate(received)}
    outputs = functional.outputs if is_last else sent
    made = [t for t in outputs if id(t) not in places]
    elsewhere = [
        v for call, of in zip(calls, stage_of, strict=True) if of != index for v in call.variables
    ]
    model = whole
    if count > 1:
        model = graph_internals.part_of(whole, inputs, made, f"{functional.name}_stage_{index}")
        if is_last:
            # Keras names the metrics of several outputs after them.
            model.output_names = list(functional.output_names)
    return Stage(
        index=index,
        count=count,
        model=model,
        own_inputs=own_inputs,
        received=tuple(Crossing(t, graph_internals.mask_of(t)) for t in received),
        used=used,
        sent=tuple(Crossing(t, graph_internals.mask_of(t)) for t in sent),
        passed=tuple(places.get(id(t)) for t in outputs),
        others=tuple({id(v): v for v in elsewhere}.values()),
        whole=functional,
        names=tuple(
            tuple(dict.fromkeys(call.name for call in calls[begin:end]))
            for begin, end in zip(starts, ends, strict=True)
        ),
    )
