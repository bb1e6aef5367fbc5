"""Data that the user divides among the ranks: each brings its own examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.data.share import Reading, Share, Source


@dataclass(frozen=True, eq=False)
class OwnSource:
    """A `Source` of which each rank holds a part of its own.

    Nobody knows how many examples the other ranks bring to a step, or when they end: a `Share` says as
    `global_examples` what this rank has, and whoever reads it counts over the ranks.
    """

    part: Source  # this rank's, in batches of its share of a global batch
    steps: int | None

    agreed: ClassVar[bool] = False
    examples: ClassVar[None] = None

    @property
    def steps_per_epoch(self) -> int | None:
        return self.steps

    @property
    def element(self) -> Any:
        return self.part.element

    @property
    def reading(self) -> Reading:
        return self.part.reading

    @property
    def unrepeatable(self) -> str:
        return self.part.unrepeatable

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        return self.part.epoch(epoch, 0, 1)

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        self.part.skip(epochs, 0, 1)
