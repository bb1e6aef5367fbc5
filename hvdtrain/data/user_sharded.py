"""Data that the user has divided: each rank brings its own examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.data.share import ReadOptions, Share, Source


@dataclass(frozen=True, eq=False)
class ShardedSource:
    """A `Source` of which each rank holds its own part.

    No rank knows how many examples the others bring to a step, or when they end. So `Share.global_examples` is the
    number of this rank's examples, and the caller adds them up over the ranks.

    Attributes:
        part: This rank's data, in batches of its share of a global batch.
        steps: Number of steps per epoch; None if unknown.
    """

    part: Source
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
    def reading(self) -> ReadOptions:
        return self.part.reading

    @property
    def unrepeatable(self) -> str:
        return self.part.unrepeatable

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        return self.part.epoch(epoch, 0, 1)

    def reset(self) -> None:
        self.part.reset()

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        self.part.skip(epochs, 0, 1)
