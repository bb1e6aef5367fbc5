"""Shards: the mark on Keras variables that hold one part of a larger variable.

Code that reduces, clips, compares or saves variables calls `shard_of`, which returns None for a whole variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.keras_internals.optimizers import optimizer_slots


@dataclass(frozen=True)
class Shard:
    """One of several equal parts of a variable.

    Attributes:
        axis: Axis along which the whole variable is divided.
        index: Index of this part, from 0.
        count: Number of parts.
    """

    axis: int
    index: int
    count: int

    def __post_init__(self) -> None:
        assert self.axis >= 0 and 0 <= self.index < self.count, self

    def bounds(self, size: int) -> tuple[int, int]:
        """Return begin and end of this part along the divided axis, which has length `size`."""
        assert size % self.count == 0, (size, self)
        part = size // self.count
        return self.index * part, (self.index + 1) * part

    def part_of(self, value: Any) -> Any:
        """Return this part of the whole array or tensor `value`."""
        begin, end = self.bounds(int(value.shape[self.axis]))
        return value[(slice(None),) * self.axis + (slice(begin, end),)]

    def part_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one part of a variable of shape `whole`."""
        begin, end = self.bounds(whole[self.axis])
        return (*whole[: self.axis], end - begin, *whole[self.axis + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole variable, given the shape of one part."""
        return (*part[: self.axis], part[self.axis] * self.count, *part[self.axis + 1 :])


def mark_shard(variable: Any, shard: Shard) -> None:
    """Mark the Keras variable `variable` as holding only `shard`."""
    variable.hvdtrain_shard = shard


def shard_of(variable: Any) -> Shard | None:
    """Return the shard that `variable` holds; None if it is whole."""
    return getattr(variable, "hvdtrain_shard", None)


def mark_slots(optimizer: Any) -> None:
    """Mark the slots of a built optimizer with the shards of their variables."""
    for variable, slots in optimizer_slots(optimizer):
        shard = shard_of(variable)
        for slot in slots:
            if shard is not None and tuple(slot.shape) == tuple(variable.shape):
                mark_shard(slot, shard)
