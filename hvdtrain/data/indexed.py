"""Data of known length: which examples stand in which global batch, found by position.

Positions count through the endless sequence of passes over the data, each in its own order: position
p is example `order(p // n)[p % n]`. That is a pure function of seed, epoch and step, never of rank,
size or history, so a rank reads no more than its own examples.
"""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hvdtrain.data.share import Reading, Share, check_workers, find_share, warn_of_too_few


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

    A pass ends with a smaller batch where the division leaves a rest. Without `steps` an epoch is one pass. With
    `steps` an epoch goes on where the last one ended, and ends with the pass at the latest, as in Keras.
    """

    reading: Reading
    pass_length: int  # examples in one pass

    agreed: ClassVar[bool] = True
    unrepeatable: ClassVar[str] = ""

    @property
    def steps_per_epoch(self) -> int:
        return self.reading.steps or self._steps_per_pass

    @property
    def examples(self) -> int:
        return self.pass_length

    @property
    def _steps_per_pass(self) -> int:
        return -(-self.pass_length // self.reading.global_batch_size)

    @property
    @abstractmethod
    def element(self) -> Any: ...

    @abstractmethod
    def sample(self) -> dict[str, list[float | str]]:
        """What ranks compare before they start, to see that they have the same data."""

    def epoch(self, epoch: int, rank: int, size: int, begin: int = 0) -> Iterator[Share]:
        """As Source.epoch, from the step `begin` on: nothing of those before it is read."""
        check_workers(self.reading.global_batch_size, size)
        if self.steps_per_epoch > self._steps_per_pass:
            warn_of_too_few(self.steps_per_epoch, self._steps_per_pass)
        return self._shares(list(self.slots(epoch, rank, size))[begin:])

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        pass

    @abstractmethod
    def _shares(self, slots: Sequence[Slot]) -> Iterator[Share]:
        """Yield the shares in `slots`, at least one, which follow each other in an epoch."""

    def positions(self, epoch: int) -> tuple[int, int]:
        """Begin and end of an epoch; both lie in one pass."""
        steps = min(self.steps_per_epoch, self._steps_per_pass)
        number, part = divmod(epoch, -(-self._steps_per_pass // steps))
        length = steps * self.reading.global_batch_size
        begin, end = part * length, min((part + 1) * length, self.pass_length)
        return number * self.pass_length + begin, number * self.pass_length + end

    def numbers(self, epoch: int, step: int, rank: int, size: int) -> list[int]:
        """The positions in the data, counted from 0, of the rank's examples in a step, as far as they are known."""
        slot = next(itertools.islice(self.slots(epoch, rank, size), step, None))
        rows = self.order(self.pass_length).rows(slot.begin, slot.end)
        return list(np.arange(self.pass_length)[rows].tolist())

    def order(self, length: int) -> "Order":
        """The order of `length` examples or items in each pass."""
        return Order(length, self.reading.shuffle, self.reading.seed)

    def slots(self, epoch: int, rank: int, size: int) -> Iterator[Slot]:
        """The rank's places in the global batches of an epoch."""
        batch = self.reading.global_batch_size
        first, last = self.positions(epoch)
        for start in range(first, last, batch):
            total = min(batch, last - start)
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
        """Which examples stand at positions begin..end of one pass; a slice where they lie in a row."""
        number, first = divmod(begin, self.length)
        rows = slice(first, first + end - begin)
        return self.of(number)[rows] if self.shuffle else rows

    def of(self, number: int) -> np.ndarray:
        """The order of a pass."""
        if number != self.number:
            self.number, self.kept = number, np.arange(self.length)
            if self.shuffle:
                rng = np.random.default_rng([self.seed, number])
                self.kept = rng.permutation(self.length)
        return self.kept
