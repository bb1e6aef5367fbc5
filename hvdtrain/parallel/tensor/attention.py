"""Attention split by heads: each rank computes the projections and the attention of its own heads."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.graph import give_mask, mask_of
from hvdtrain.parallel.group_collectives import copy_to_parts, gather_parts
from hvdtrain.parallel.tensor.dense import RowParallelEinsumDense
from hvdtrain.parallel.tensor.split import PartDropout, SplitLayer, built_in_parts


class _HeadsParallel(SplitLayer):
    """Mixin that splits an attention layer with projections `_query_dense` and so on."""

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        with built_in_parts(self):
            super().build(query_shape, value_shape, key_shape)  # type: ignore[misc]

    def split(self) -> None:
        layer: Any = self
        # Keras's attention layers store it under different names.
        if getattr(layer, "_activity_regularizer", None) or layer.activity_regularizer:
            raise UsageError(
                f"Layer {layer.name!r} cannot be split by heads: its activity_regularizer depends on all heads. "
                "Leave it out"
            )
        for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense"):
            projection = getattr(layer, name, None)
            if projection is not None:
                self._cut_projection(projection, name)
        output = layer._output_dense
        output.__class__ = RowParallelEinsumDense
        output.set_group(self.group)
        output.split()
        dropout = layer._dropout_layer
        dropout.__class__ = PartDropout
        dropout.set_group(self.group)
        # Scores have the shape (batch dimensions, heads, query dimensions, key dimensions).
        dropout.split_axis = self._scores_axis

    def _cut_projection(self, projection: Any, name: str) -> None:
        heads = int(projection._kernel.shape[1])
        if heads % self.group.size():
            raise UsageError(
                f"Layer {self.name!r} cannot be split by heads: {heads} "  # type: ignore[attr-defined]
                f"{name.strip('_').split('_')[0]} heads are not a multiple of the "
                f"{self.group.size()} ranks that split it"
            )
        self._cut(projection._kernel, 1)
        self._cut(projection.bias, 0)

    @property
    def _scores_axis(self) -> int:
        return -1 - 2 * len(getattr(self, "_attention_axes", None) or (1,))

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        copies: dict[int, tuple[Any, Any]] = {}

        def copied(tensor: Any, name: str) -> Any:
            # One copy per tensor: in self-attention query, key and value are the same.
            if tensor is None:
                return None
            if id(tensor) not in copies:
                copy = copy_to_parts(tensor, self.group, f"{self.collective}_{name}")
                give_mask(copy, mask_of(tensor))
                copies[id(tensor)] = (tensor, copy)
            return copies[id(tensor)][1]

        outputs = super().call(  # type: ignore[misc]
            copied(query, "query"),
            copied(value, "value"),
            key=copied(key, "key"),
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )
        for tensor, copy in copies.values():
            give_mask(tensor, mask_of(copy))  # Keras removes masks that it has used.
        if not return_attention_scores:
            return outputs
        output, scores = outputs
        return output, gather_parts(scores, self.group, self.collective, self._scores_axis)


class HeadsParallelAttention(_HeadsParallel, keras.layers.MultiHeadAttention):
    """MultiHeadAttention split by heads: rank i of n computes the i-th of n equal groups of heads.

    Args:
        num_heads: Number of heads of the whole layer; a multiple of the group's size.
        key_dim: Size of each head for query and key.
        group: Ranks that split the layer.
        kwargs: Arguments of keras.layers.MultiHeadAttention.
    """

    def __init__(self, num_heads: int, key_dim: int, *, group: Communicator, **kwargs: Any) -> None:
        super().__init__(num_heads, key_dim, group=group, **kwargs)


class HeadsParallelGroupedAttention(_HeadsParallel, keras.layers.GroupQueryAttention):
    """GroupQueryAttention split by heads: rank i of n computes the i-th of n equal groups of query and key heads.

    Args:
        head_dim: Size of each head.
        num_query_heads: Number of query heads; a multiple of the group's size.
        num_key_value_heads: Number of key and value heads; a multiple of the group's size.
        group: Ranks that split the layer.
        kwargs: Arguments of keras.layers.GroupQueryAttention.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        *,
        group: Communicator,
        **kwargs: Any,
    ) -> None:
        super().__init__(head_dim, num_query_heads, num_key_value_heads, group=group, **kwargs)
