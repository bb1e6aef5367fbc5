"""Reduce-scatter of gradients and all-gather of weights, for optimizers with sharded state.

Each variable has two collectives of its own, which Horovod packs in its fusion buffer, so a gradient is sent as soon
as the backward pass has computed it. As in collectives.reduction, the collectives have explicit names, and the update
depends on their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.reduction import Gradient, Reduction, reduce_sparse
from hvdtrain.keras.optimizer import OptimizerReducer


@dataclass(frozen=True)
class Partition:
    """The part of one variable that rank `index` of `count` updates: one contiguous part of the flat variable.

    The sizes of the parts differ by at most one element, and the first ranks have the longer ones, as in Horovod's
    reducescatter, so nothing is padded. A variable with fewer elements than there are ranks has empty parts.

    Attributes:
        shape: Shape of the variable.
        index: Number of the rank, from 0.
        count: Number of ranks.
    """

    shape: tuple[int, ...]
    index: int
    count: int

    @property
    def elements(self) -> int:
        """Number of elements of the variable."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return self.elements // self.count + (self.index < self.elements % self.count)

    @property
    def begin(self) -> int:
        """Index of the part's first element in the flat variable."""
        return self.index * (self.elements // self.count) + min(
            self.index, self.elements % self.count
        )

    def of(self, flat: Any) -> Any:
        """Return the part of `flat`, an array or tensor of shape (elements,)."""
        return flat[self.begin : self.begin + self.size]


class ShardedReducer(OptimizerReducer):
    """Reduces gradients, and returns to each rank only its parts of them.

    A variable is divided over the ranks that hold the same one: those of the reduction, or its `holders`.

    Attributes:
        own_state: Optimizer state of this rank's parts, which no other rank holds.
    """

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction)
        self.own_state: list[Any] = []

    @property
    def holds_parts(self) -> bool:
        return True

    def is_divided(self, variable: Any) -> bool:
        return not self.is_local(variable)

    @property
    def local_variables(self) -> list[Any]:
        """The variables given to `register_local`, and the optimizer state: what no other rank holds."""
        return [*super().local_variables, *self.own_state]

    def partition(self, variable: Any) -> Partition:
        """Return the part of `variable` that this rank updates; a local variable is not divided."""
        shape = tuple(int(size) for size in variable.shape)
        if self.is_local(variable):
            return Partition(shape, 0, 1)
        ranks = self._options_for(variable, False).process_set
        return Partition(shape, ranks.rank(), ranks.size())

    def __call__(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        positions: Sequence[int] | None = None,
        weighted: bool = False,
    ) -> list[Gradient]:
        """Return this rank's parts, each of shape (size,), of the reduced gradients, in the same order."""
        assert positions is not None
        prefix = self._name(variables)
        parts = []
        for gradient, variable, position in zip(gradients, variables, positions, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                name = f"{prefix}_{position}"
                parts.append(self._part_of_slices(gradient, variable, name, weighted))
                continue
            flat = tf.reshape(gradient, [-1])
            if self.is_local(variable):
                parts.append(self._keep_local(flat, weighted))
                continue
            how = self._options_for(variable, weighted)
            part = how.process_set.reducescatter(
                flat, f"{prefix}_{position}", how.op, how.postscale_factor
            )
            part.set_shape([self.partition(variable).size])
            parts.append(part)
        return parts

    def _part_of_slices(
        self, slices: tf.IndexedSlices, variable: Any, name: str, weighted: bool
    ) -> tf.IndexedSlices:
        """Return the elements of all ranks' slices that belong to this rank's part.

        A row that occurs twice remains two slices, since plain Keras also squares and clips slices one by one.
        """
        if self.is_local(variable):
            reduced = self._keep_local(slices, weighted)
        else:
            reduced = reduce_sparse(slices, name, self._options_for(variable, weighted), variable)
        return elements_of(reduced, self.partition(variable))

    def whole(
        self, parts: Sequence[Any], variables: Sequence[Any], names: Sequence[str]
    ) -> list[tf.Tensor]:
        """Gather the flat tensors, each of shape (elements,), of which each rank holds a part.

        Args:
            parts: This rank's parts, each of shape (size,).
            variables: For each part, the variable that is divided in the same way.
            names: For each part, the last piece of its collective's name.
        """
        prefix = f"{self._name()}_whole"
        found = []
        for part, variable, name in zip(parts, variables, names, strict=True):
            partition = self.partition(variable)
            if partition.count == 1:
                found.append(part)
                continue
            ranks = self._options_for(variable, False).process_set
            flat = ranks.allgather(part, f"{prefix}_{name}")
            flat.set_shape([partition.elements])
            found.append(flat)
        return found


def elements_of(slices: tf.IndexedSlices, partition: Partition) -> tf.IndexedSlices:
    """Return the elements of `slices` that are in the part, as slices of the flat part of shape (size,)."""
    width = partition.elements // partition.shape[0]
    first = tf.cast(slices.indices, tf.int64) * width - partition.begin
    places = tf.reshape(first[:, tf.newaxis] + tf.range(width, dtype=tf.int64), [-1])
    mine = tf.logical_and(places >= 0, places < partition.size)
    values = tf.boolean_mask(tf.reshape(slices.values, [-1]), mine)
    return tf.IndexedSlices(values, tf.boolean_mask(places, mine), [partition.size])
