"""The marker on a Keras variable that holds one part of a larger one.

Whoever reduces, clips, compares or saves variables asks `shard_of`: None is a whole variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.keras_internals.optimizers import optimizer_slots


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts along `axis` of the whole variable."""

    axis: int
    index: int
    count: int

    def __post_init__(self) -> None:
        assert self.axis >= 0 and 0 <= self.index < self.count, self

    def bounds(self, size: int) -> tuple[int, int]:
        """Begin and end of this part along a dimension of the whole that is `size` long."""
        assert size % self.count == 0, (size, self)
        part = size // self.count
        return self.index * part, (self.index + 1) * part

    def part_of(self, value: Any) -> Any:
        """Return this part of `value`, a whole array or tensor."""
        begin, end = self.bounds(int(value.shape[self.axis]))
        return value[(slice(None),) * self.axis + (slice(begin, end),)]

    def part_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part of a variable of shape `whole`."""
        begin, end = self.bounds(whole[self.axis])
        return (*whole[: self.axis], end - begin, *whole[self.axis + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the variable that parts of shape `part` make up."""
        return (*part[: self.axis], part[self.axis] * self.count, *part[self.axis + 1 :])


def mark_shard(variable: Any, shard: Shard) -> None:
    """Say that the Keras variable `variable` holds only `shard`."""
    variable.hvdtrain_shard = shard


def shard_of(variable: Any) -> Shard | None:
    """Return which part of a larger one `variable` holds, None if it is whole."""
    return getattr(variable, "hvdtrain_shard", None)


def mark_slots(optimizer: Any) -> None:
    """Mark the state of a built optimizer for variables that are parts as parts."""
    for variable, slots in optimizer_slots(optimizer):
        shard = shard_of(variable)
        for slot in slots:
            if shard is not None and tuple(slot.shape) == tuple(variable.shape):
                mark_shard(slot, shard)
