"""Which elements of a variable are whose: the flat variable in contiguous parts, one per rank.

The parts differ by at most one element, the first ranks having the longer ones, which is how Horovod's
reducescatter divides a tensor: nothing is padded. A variable of fewer elements than ranks has empty parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Partition:
    """The part of one variable that rank `index` of `count` updates.

    Attributes:
        shape: of the variable.
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
        """Place of the part's first element in the flat variable."""
        return self.index * (self.elements // self.count) + min(
            self.index, self.elements % self.count
        )

    def of(self, flat: Any) -> Any:
        """Return the part of `flat`, an array or tensor of (elements,)."""
        return flat[self.begin : self.begin + self.size]


def bounded_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the places of `sizes` in order, in groups whose sums stay within `limit` where one alone does."""
    groups: list[list[int]] = []
    total = 0
    for place, size in enumerate(sizes):
        if not groups or total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(place)
        total += size
    return groups
