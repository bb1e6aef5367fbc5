"""Split the layers of a Keras model according to a plan, for a mesh of data x tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import keras

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.mesh import Position
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.deferred_variables import deferred_variables_of, initialize, keep_part
from hvdtrain.keras_internals.models import children, is_built
from hvdtrain.keras_internals.optimizers import optimizer_slots
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.tensor.attention import (
    HeadsParallelAttention,
    HeadsParallelGroupedAttention,
)
from hvdtrain.parallel.tensor.dense import ColumnParallelDense, RowParallelDense
from hvdtrain.parallel.tensor.elementwise_calls import is_elementwise_activation
from hvdtrain.parallel.tensor.embedding import (
    ColumnParallelEmbedding,
    VocabularyParallelEmbedding,
)
from hvdtrain.parallel.tensor.flow import Graph, find_flow, graph_of
from hvdtrain.parallel.tensor.split import PartDropout, SplitLayer
from hvdtrain.parallel.whole_model import make_part, require_whole_optimizer
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.strategy import ModelSource

KINDS: dict[type, dict[str, type]] = {
    keras.layers.Dense: {"column": ColumnParallelDense, "row": RowParallelDense},
    keras.layers.Embedding: {
        "vocabulary": VocabularyParallelEmbedding,
        "column": ColumnParallelEmbedding,
    },
    keras.layers.MultiHeadAttention: {"heads": HeadsParallelAttention},
    keras.layers.GroupQueryAttention: {"heads": HeadsParallelGroupedAttention},
}
"""Layer class -> way to split it -> class of the split layer."""


class SplitRunner(Runner):
    """Runner on a rank that holds its parts of the layers that the layout names, and all other layers whole.

    The ranks of a tensor set compute the same examples: they read the same share, draw the same dropout masks and hold
    the same unsplit variables. `Trainer.model` is the model with split layers; its outputs are whole.

    Args:
        layout: Mesh, and the layers to split.
        position: Position of this rank in the mesh.
    """

    def __init__(self, layout: Layout, position: Position) -> None:
        super().__init__(position)
        self._layout = layout

    def build(self, model: ModelSource) -> keras.Model:
        converted = convert(model, self._layout.split, self.position)
        if self.position.mesh.tensor > 1:
            make_part(converted, converted)
        return converted

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        require_whole_optimizer(model)
        super().build_variables(model, data, what)


def convert(
    model: keras.Model | Callable[[], keras.Model], plan: Mapping[str, str], position: Position
) -> keras.Model:
    """Split the layers that `plan` names over the ranks of `position.tensor_set`; return the model.

    The model is changed in place: the layers become split layers, which hold this rank's parts of their variables (and
    of their optimizer state, if there is any). A model given as a function is built one variable at a time, without
    memory for the parts that this rank does not keep. Nothing is sent: ranks that draw the same initial values hold
    parts of the same model.

    Args:
        model: Built model (one that knows its input shapes), or a function that makes one.
        plan: Mapping from regular expressions for the whole paths of layers to "column", "row", "heads" or
            "vocabulary".
        position: Position of this rank in the mesh.

    Returns:
        The model, or the one that the function made.

    Raises:
        UsageError: The model is not built, a pattern matches no layer, a layer cannot be split that way, or a size
            is not a multiple of the number of ranks.
    """
    with deferred_variables_of() as waiting:
        made = model if isinstance(model, keras.Model) else model()
    if position.tensor_set.size() > 1:
        if not is_built(made):
            raise UsageError(
                f"Model {made.name!r} has layers without weights yet, which cannot be split: start "
                "it with keras.Input(shape), or call it once"
            )
        split_model(made, plan, position.tensor_set)
    for variable in waiting:
        initialize(variable)
    return made


def split_model(model: keras.Model, plan: Mapping[str, str], group: Communicator) -> None:
    """Split the layers of a built model, in place; see `convert`."""
    layers = Layers(model)
    ways = _ways(layers, plan)
    for identity, way in ways.items():
        _require_kind(layers.paths[identity][0], layers.by_id[identity], way)
    dense = {i: w for i, w in ways.items() if type(layers.by_id[i]) is keras.layers.Dense}
    seen = {i: layers.by_id[i] for i in dense if i not in layers.in_code}
    flow = find_flow(
        layers.graphs,
        {
            i: layer
            for i, layer in seen.items()
            if dense[i] == "column"
            and layer.activity_regularizer is None
            and (layer.activation is None or is_elementwise_activation(layer.activation))
        },
        {i: layer for i, layer in seen.items() if dense[i] == "row"},
        layers.in_code,
    )
    whole_shapes = {id(v): tuple(v.shape) for v in model.trainable_variables}
    for identity, way in ways.items():
        layer = layers.by_id[identity]
        layer.__class__ = KINDS[type(layer)][way]
        layer.set_group(group)
        layer.split()
        if isinstance(layer, ColumnParallelDense):
            layer.gather_output = identity not in flow.open_columns
        if isinstance(layer, RowParallelDense):
            layer.input_is_split = identity in flow.split_rows
            layer.accept_input()
    for identity in flow.between:
        layer = layers.by_id.get(identity)  # None for an operation of keras.ops.
        if layer is not None and type(layer) is keras.layers.Dropout:
            layer.__class__ = PartDropout
            layer.set_group(group)
    split_optimizer(getattr(model, "optimizer", None), whole_shapes)


def split_optimizer(optimizer: Any, whole_shapes: Mapping[int, tuple[int, ...]]) -> None:
    """Split the state that an optimizer already has for variables that were split.

    Args:
        optimizer: Built or unbuilt optimizer, or None.
        whole_shapes: Shapes of the variables before they were split, by id.
    """
    if optimizer is None or not optimizer.built:
        return
    for variable, slots in optimizer_slots(optimizer):
        shard = shard_of(variable)
        if shard is None:
            continue
        for slot in slots:
            if tuple(slot.shape) == whole_shapes.get(id(variable)):
                keep_part(slot, shard)


class Layers:
    """The layers in a model, at any depth.

    Attributes:
        by_id: Layers by id.
        paths: For each id, the paths of the layer: the names of the layers that contain it, then its own.
        graphs: Graphs of the model and of the models in it, where they run one.
        in_code: Ids of layers that are called by a `call` method, whose inputs are unknown.
    """

    def __init__(self, model: keras.Model) -> None:
        self.by_id: dict[int, Any] = {}
        self.paths: dict[int, list[str]] = {}
        self.graphs: list[Graph] = []
        self.in_code: set[int] = set()
        self._visit(model, "")

    def _visit(self, owner: Any, prefix: str) -> None:
        graph = graph_of(owner)
        if graph is not None:
            self.graphs.append(graph)
        for layer in children(owner):
            if graph is None:
                self.in_code.add(id(layer))
            path = f"{prefix}{layer.name}"
            known = id(layer) in self.by_id
            self.by_id[id(layer)] = layer
            self.paths.setdefault(id(layer), []).append(path)
            if not known:
                self._visit(layer, f"{path}/")

    def named(self, pattern: str) -> list[int]:
        """Return the ids of the layers with a path that `pattern` matches as a whole."""
        return [
            i for i, paths in self.paths.items() if any(re.fullmatch(pattern, p) for p in paths)
        ]

    def splittable(self) -> list[str]:
        """Return the paths of layers that can be split."""
        return [self.paths[i][0] for i, layer in self.by_id.items() if type(layer) in KINDS]


def _ways(layers: Layers, plan: Mapping[str, str]) -> dict[int, str]:
    """Return the way to split each layer that the plan names, by id, in the model's order."""
    found: dict[int, str] = {}
    by_pattern: dict[int, str] = {}
    for pattern, way in plan.items():
        named = layers.named(pattern)
        if not named:
            paths = layers.splittable()
            shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
            raise UsageError(
                f"split: no layer path matches {pattern!r}. Paths of layers that can be split: "
                f"{shown or 'none'}"
            )
        for i in named:
            if found.setdefault(i, way) != way:
                raise UsageError(
                    f"split: layer {layers.paths[i][0]!r} is split by {found[i]} by {by_pattern[i]!r} and by "
                    f"{way} by {pattern!r}: only one pattern may match it"
                )
            by_pattern[i] = pattern
    return {i: found[i] for i in layers.by_id if i in found}


def _require_kind(path: str, layer: Any, way: str) -> None:
    """Raise UsageError unless `layer` can be split that way."""
    if isinstance(layer, SplitLayer):
        raise UsageError(f"split: layer {path!r} is already split")
    ways = KINDS.get(type(layer))
    if ways is None:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise UsageError(
            f"split: layer {path!r} is a {type(layer).__name__}, which cannot be split; these can: {kinds} "
            "(but not their subclasses). Let the pattern match only layers of these kinds"
        )
    if way not in ways:
        raise UsageError(
            f"split: layer {path!r} is a {type(layer).__name__}, which can be split by "
            f"{' or '.join(ways)}, not by {way}"
        )
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
        raise UsageError(f"split: layer {path!r} is quantized or has LoRA: split plain layers")
