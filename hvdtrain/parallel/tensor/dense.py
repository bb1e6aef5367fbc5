"""Dense layers split over ranks: by the columns (outputs) or by the rows (inputs) of the kernel."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.parallel.group_collectives import (
    copy_to_parts,
    gather_parts,
    sum_parts,
    take_part,
)
from hvdtrain.parallel.tensor.elementwise_calls import is_elementwise_activation
from hvdtrain.parallel.tensor.split import SplitLayer, built_in_parts


class ColumnParallelDense(SplitLayer, keras.layers.Dense):
    """Dense split by columns: rank i of n computes the i-th of n equal groups of units.

    Args:
        units: Number of units of the whole layer; a multiple of the group's size.
        group: Ranks that split the layer.
        gather_output: Whether to return all units on every rank. False returns this rank's units, for elementwise
            layers and a RowParallelDense after them.
        kwargs: Arguments of keras.layers.Dense.
    """

    gather_output = True

    def __init__(
        self, units: int, *, group: Communicator, gather_output: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(units, group=group, **kwargs)
        self.gather_output = gather_output

    def build(self, input_shape: Any) -> None:
        with built_in_parts(self):
            super().build(input_shape)

    def split(self) -> None:
        self._cut(self._kernel, 1)
        self._cut(self.bias, 0)

    def call(self, inputs: Any, training: Any = None) -> Any:
        x = copy_to_parts(inputs, self.group, self.collective)
        x = ops.matmul(x, self._kernel)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if not self.gather_output:
            return x if self.activation is None else self.activation(x)
        if self.activation is None or is_elementwise_activation(self.activation):
            x = x if self.activation is None else self.activation(x)
            return gather_parts(x, self.group, self.collective)
        return self.activation(gather_parts(x, self.group, self.collective))

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        parts = 1 if self.gather_output else self.group.size()
        return (*input_shape[:-1], self.units // parts)


class RowParallelDense(SplitLayer, keras.layers.Dense):
    """Dense split by rows: rank i of n multiplies the i-th of n equal groups of inputs; the products are summed.

    Args:
        units: Number of units.
        group: Ranks that split the layer.
        input_is_split: Whether the input holds only this rank's part, from a ColumnParallelDense without
            gather_output. False: the input is whole, and each rank takes its part.
        kwargs: Arguments of keras.layers.Dense.
    """

    input_is_split = False

    def __init__(
        self, units: int, *, group: Communicator, input_is_split: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(units, group=group, **kwargs)
        self.input_is_split = input_is_split

    def build(self, input_shape: Any) -> None:
        parts = self.group.size() if self.input_is_split else 1
        with built_in_parts(self):
            super().build((*input_shape[:-1], input_shape[-1] * parts))
        self.accept_input()

    def accept_input(self) -> None:
        """Set the input spec that belongs to `input_is_split`."""
        parts = 1 if self.input_is_split else self.group.size()
        size = int(self._kernel.shape[0]) * parts
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: size})

    def split(self) -> None:
        self._cut(self._kernel, 0)

    def call(self, inputs: Any, training: Any = None) -> Any:
        x = inputs if self.input_is_split else take_part(inputs, self.group, self.collective)
        x = sum_parts(ops.matmul(x, self._kernel), self.group, self.collective)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class RowParallelEinsumDense(SplitLayer, keras.layers.EinsumDense):
    """EinsumDense, split by the first dimension of its kernel, over which it sums: attention's output projection."""

    def split(self) -> None:
        self._cut(self._kernel, 0)

    def call(self, inputs: Any, training: Any = None) -> Any:
        x = ops.einsum(self.equation, inputs, self._kernel)
        x = sum_parts(x, self.group, self.collective)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)
