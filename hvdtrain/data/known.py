"""Data of known length: which examples stand in which global batch, found by position.

Positions count through the endless sequence of passes over the data, each in its own order: position
p is example `order(p // n)[p % n]`. That is a pure function of seed, epoch and step, never of rank,
size or history, so a rank reads no more than its own examples.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hvdtrain.data.share import Share, check_workers, find_share


@dataclass(frozen=True)
class Slot:
    """A rank's place in one global batch: positions begin..end, of which `examples` count (0: idle)."""

    begin: int
    end: int
    examples: int
    global_examples: int
    offset: int

    def share(self, data: Any, checksum: int | None = None) -> Share:
        return Share(data, self.examples, self.global_examples, self.offset, checksum)


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownSource:
    """A `Source` whose length is known.

    Without `steps` an epoch is one pass, its last batch smaller where the division leaves a rest.
    With `steps` an epoch is that many full batches, and the next one goes on where it ended: a
    batch then can join the end of one pass and the beginning of the next.
    """

    pass_length: int  # examples in one pass
    global_batch_size: int
    shuffle: bool
    seed: int
    steps: int | None
    float_dtype: str

    agreed: ClassVar[bool] = True

    @property
    def steps_per_epoch(self) -> int:
        return self.steps or -(-self.pass_length // self.global_batch_size)

    @property
    def examples(self) -> int:
        return self.steps * self.global_batch_size if self.steps else self.pass_length

    @property
    @abstractmethod
    def element(self) -> Any: ...

    @abstractmethod
    def sample(self) -> dict[str, list[float | str]]:
        """What ranks compare before they start, to see that they have the same data."""

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        check_workers(self.global_batch_size, size)
        return self._shares(epoch, rank, size)

    @abstractmethod
    def _shares(self, epoch: int, rank: int, size: int) -> Iterator[Share]: ...

    def slots(self, epoch: int, rank: int, size: int) -> Iterator[Slot]:
        """The rank's places in the global batches of an epoch."""
        first, last = epoch * self.examples, (epoch + 1) * self.examples
        for start in range(first, last, self.global_batch_size):
            total = min(self.global_batch_size, last - start)
            begin, end, examples = find_share(total, rank, size)
            yield Slot(start + begin, start + end, examples, total, begin)


@dataclass
class Order:
    """Examples by position, keeping the order of the pass that was asked for last."""

    length: int
    shuffle: bool
    seed: int
    number: int = field(default=-1, init=False)  # of the pass whose order is kept
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)

    def rows(self, begin: int, end: int) -> slice | np.ndarray:
        """Which examples stand at positions begin..end; a slice where they lie in a row."""
        pieces = list(passes(begin, end, self.length))
        if not self.shuffle and len(pieces) == 1:
            return slice(*pieces[0][1:])
        rows = [self.of(number)[first:last] for number, first, last in pieces]
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

    def of(self, number: int) -> np.ndarray:
        """The order of a pass."""
        if number != self.number:
            self.number, self.kept = number, np.arange(self.length)
            if self.shuffle:
                rng = np.random.default_rng([self.seed, number])
                self.kept = rng.permutation(self.length)
        return self.kept


def passes(begin: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Positions begin..end as pieces (pass, begin, end) of passes of `length`."""
    while begin < end:
        number, first = divmod(begin, length)
        last = min(length, first + end - begin)
        yield number, first, last
        begin += last - first
