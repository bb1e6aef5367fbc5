"""The division of a variable over ranks: the flat variable, cut into one contiguous part per rank.

The sizes of the parts differ by at most one element, and the first ranks have the longer ones, as in Horovod's
reducescatter, so nothing is padded. A variable with fewer elements than there are ranks has empty parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Partition:
    """The part of one variable that rank `index` of `count` updates.

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
