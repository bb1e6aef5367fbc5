"""Data of known length: finds the examples of each global batch by position.

Positions count through the endless sequence of passes over the data, each in its own order: position p is example
`order(p // n)[p % n]`. That is a pure function of seed, epoch and step, never of rank, size or history, so a rank reads
only its own examples.
"""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hvdtrain.data.share import ReadOptions, Share, check_workers, find_share, warn_of_too_few


@dataclass(frozen=True)
class Slot:
    """A rank's place in one global batch.

    Attributes:
        begin: First position to read.
        end: Position after the last one to read.
        examples: Number of these examples that count; 0 if the rank is idle.
        global_examples: Number of examples of all ranks in the step.
        offset: Position of this rank's first example in the global batch.
    """

    begin: int
    end: int
    examples: int
    global_examples: int
    offset: int

    def share(self, data: Any, checksum: int | None = None) -> Share:
        return Share(data, self.examples, self.global_examples, self.offset, checksum)


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownSource:
    """A `Source` of known length.

    The last batch of a pass is smaller if the batch size does not divide the number of examples. Without `steps` an
    epoch is one pass. With `steps` an epoch continues where the last one stopped, and ends with the pass at the latest,
    as in Keras.

    Attributes:
        reading: Settings of the reading.
        pass_length: Number of examples in one pass.
    """

    reading: ReadOptions
    pass_length: int

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
        """Return values of the data by which ranks check, before they start, that they have the same data."""

    def epoch(self, epoch: int, rank: int, size: int, begin: int = 0) -> Iterator[Share]:
        """As `Source.epoch`, from the step with index `begin` on; nothing before it is read."""
        check_workers(self.reading.global_batch_size, size)
        if self.steps_per_epoch > self._steps_per_pass:
            warn_of_too_few(self.steps_per_epoch, self._steps_per_pass)
        return self._shares(list(self.slots(epoch, rank, size))[begin:])

    def reset(self) -> None:
        pass

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        pass

    @abstractmethod
    def _shares(self, slots: Sequence[Slot]) -> Iterator[Share]:
        """Yield the shares of `slots`, at least one, which are consecutive steps of an epoch."""

    def positions(self, epoch: int) -> tuple[int, int]:
        """Return the first position of an epoch and the one after its last; both lie in one pass."""
        steps = min(self.steps_per_epoch, self._steps_per_pass)
        number, part = divmod(epoch, -(-self._steps_per_pass // steps))
        length = steps * self.reading.global_batch_size
        begin, end = part * length, min((part + 1) * length, self.pass_length)
        return number * self.pass_length + begin, number * self.pass_length + end

    def numbers(self, epoch: int, step: int, rank: int, size: int) -> list[int]:
        """Return the indices in the data, from 0, of the rank's examples in a step; empty if unknown.

        Args:
            epoch: Index of the epoch, from 0.
            step: Index of the step, from 0.
            rank: Index of the reading process.
            size: Number of reading processes.
        """
        slot = next(itertools.islice(self.slots(epoch, rank, size), step, None))
        rows = self.order(self.pass_length).rows(slot.begin, slot.end)
        return list(np.arange(self.pass_length)[rows].tolist())

    def order(self, length: int) -> "Order":
        """Return the order of `length` examples or items in each pass."""
        return Order(length, self.reading.shuffle, self.reading.seed)

    def slots(self, epoch: int, rank: int, size: int) -> Iterator[Slot]:
        """Yield the rank's places in the global batches of an epoch."""
        batch = self.reading.global_batch_size
        first, last = self.positions(epoch)
        for start in range(first, last, batch):
            total = min(batch, last - start)
            begin, end, examples = find_share(total, rank, size)
            yield Slot(start + begin, start + end, examples, total, begin)


@dataclass
class Order:
    """The order of examples in each pass.

    Attributes:
        length: Number of examples in a pass.
        shuffle: Whether to shuffle.
        seed: Seed of the shuffling.
        number: Index of the pass whose order is kept; -1: none yet.
        kept: Order of that pass.
    """

    length: int
    shuffle: bool
    seed: int
    number: int = field(default=-1, init=False)
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)

    def rows(self, begin: int, end: int) -> slice | np.ndarray:
        """Return the indices of the examples at positions begin..end of one pass; a slice without shuffling."""
        number, first = divmod(begin, self.length)
        rows = slice(first, first + end - begin)
        return self.of(number)[rows] if self.shuffle else rows

    def of(self, number: int) -> np.ndarray:
        """Return the order of the pass with index `number`: int64, shape (length,)."""
        if number != self.number:
            self.number, self.kept = number, np.arange(self.length)
            if self.shuffle:
                rng = np.random.default_rng([self.seed, number])
                self.kept = rng.permutation(self.length)
        return self.kept
