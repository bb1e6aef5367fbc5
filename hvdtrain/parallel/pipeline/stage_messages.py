"""The tensors that a stage exchanges with its neighbours for a micro-batch, as messages of a transport.

Forward: each tensor that crosses the cut, followed by its padding mask if it has one. Backward: the gradient of each
of the differentiable ones. Shapes are sent once, ahead of the first micro-batch of each size; dtypes are those of the
symbolic model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import EngineError
from hvdtrain.parallel.pipeline.stages import Crossing, Stage
from hvdtrain.parallel.pipeline.transport import ArraySpec, Transport

Tensors = list[Any]


class Exchange:
    """The messages of one stage, within one copy of the model.

    Args:
        stage: Stage of this rank.
        ranks: Ranks of all stages of this copy, in order.
        transport: Transport that carries the messages.
    """

    def __init__(self, stage: Stage, ranks: Sequence[int], transport: Transport) -> None:
        self._stage = stage
        self._ranks = ranks
        self._transport = transport
        self._before: dict[Hashable, list[ArraySpec]] = {}
        self._behind: dict[Hashable, list[ArraySpec]] = {}

    def receive_forward(self, micro_batch: int, size: Hashable) -> Tensors:
        """Return the previous stage's tensors for a micro-batch; [] on the first stage.

        Args:
            micro_batch: Number of the micro-batch, for error messages.
            size: Key that is equal for micro-batches of equal shapes; the same on all stages.

        Raises:
            EngineError: See Transport.receive.
        """
        if not self._stage.index:
            return []
        rank = self._ranks[self._stage.index - 1]
        what = f"the activations of micro-batch {micro_batch} (stage {self._stage.index - 1})"
        dtypes = _dtypes(self._stage.received)
        if size not in self._before:
            ranks = [len(shape) for shape in _shapes(self._stage.received)]
            flat = self._transport.receive(rank, [ArraySpec((sum(ranks),), np.int64)], what)[0]
            ends = np.cumsum(ranks)
            self._before[size] = [
                ArraySpec(tuple(int(d) for d in flat[end - length : end]), dtype)
                for end, length, dtype in zip(ends, ranks, dtypes, strict=True)
            ]
        arrays = self._transport.receive(rank, self._before[size], what)
        return [tf.convert_to_tensor(array) for array in arrays]

    def send_forward(self, tensors: Sequence[Any], size: Hashable) -> None:
        """Send the next stage its tensors for a micro-batch.

        Raises:
            EngineError: The tensors have other dtypes than the model declares.
        """
        rank = self._ranks[self._stage.index + 1]
        arrays = [tensor.numpy() for tensor in tensors]
        if size not in self._behind:
            self._behind[size] = [ArraySpec(array.shape, array.dtype) for array in arrays]
            dtypes = [np.dtype(dtype) for dtype in _dtypes(self._stage.sent)]
            if [array.dtype for array in arrays] != dtypes:
                raise EngineError(
                    f"Stage {self._stage.index} computes {[str(a.dtype) for a in arrays]}, but the model declares "
                    f"{[str(d) for d in dtypes]}: give the layers at the cut a fixed dtype"
                )
            shapes = [dimension for array in arrays for dimension in array.shape]
            self._transport.send(rank, [np.array(shapes, np.int64)])
        self._transport.send(rank, arrays)

    def receive_backward(
        self, micro_batch: int, size: Hashable, values: int
    ) -> tuple[Tensors, np.ndarray]:
        """Return the gradients of the tensors sent forward, and the `values` float64 numbers sent along with them."""
        rank = self._ranks[self._stage.index + 1]
        what = f"the gradients of micro-batch {micro_batch} (stage {self._stage.index + 1})"
        specs = with_gradients(self._behind[size], self._stage.sent)
        extra = [ArraySpec((values,), np.float64)] if values else []
        arrays = self._transport.receive(rank, [*specs, *extra], what)
        gradients = [tf.convert_to_tensor(array) for array in arrays[: len(specs)]]
        return gradients, arrays[-1] if values else np.zeros(0)

    def send_backward(self, gradients: Sequence[Any], values: np.ndarray) -> None:
        """Send the previous stage the gradients of its tensors, and `values`."""
        rank = self._ranks[self._stage.index - 1]
        arrays = [gradient.numpy() for gradient in gradients]
        self._transport.send(rank, [*arrays, values] if values.size else arrays)

    def flush(self) -> None:
        """Wait until all messages have left."""
        self._transport.flush()


def tensors_of(crossings: Sequence[Crossing]) -> list[tuple[Crossing, bool]]:
    """Return the tensors that are sent for `crossings`, in order, as (crossing, whether it is the mask) pairs."""
    return [
        (crossing, mask)
        for crossing in crossings
        for mask in ((False, True) if crossing.masked else (False,))
    ]


def with_gradients(values: Sequence[Any], crossings: Sequence[Crossing]) -> list[Any]:
    """Return those of `values`, one for each of `tensors_of(crossings)`, for which a gradient is sent back."""
    pairs = zip(values, tensors_of(crossings), strict=True)
    return [value for value, (crossing, mask) in pairs if crossing.differentiable and not mask]


def _shapes(crossings: Sequence[Crossing]) -> list[Any]:
    return [
        crossing.mask.shape if mask else crossing.tensor.shape
        for crossing, mask in tensors_of(crossings)
    ]


def _dtypes(crossings: Sequence[Crossing]) -> list[Any]:
    return [
        np.bool_ if mask else tf.as_dtype(str(crossing.tensor.dtype)).as_numpy_dtype
        for crossing, mask in tensors_of(crossings)
    ]
