"""Data sources, and the share of a global batch that a source gives to one rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.errors import UsageError, warn_user


@dataclass(frozen=True)
class Part:
    """The share of each global batch that a process reads: number `index` (from 0) of `count`."""

    index: int
    count: int


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch.

    Attributes:
        data: what Keras's fit passes to train_step: (x, y), (x, y, sample_weight), (x,), or x alone if it was passed
            alone. Each is a NumPy array, or a nested dict, list or tuple of arrays, with this rank's examples along the
            first dimension. Do not write to them: they may be views of the user's arrays. An idle rank (`examples` is
            0, in a tail smaller than the number of workers) gets one real example of the global batch, so that it can
            run the step and take part in its collectives; its result has weight zero.
        examples: number of this rank's examples in the step.
        global_examples: number of examples of all ranks in the step.
        offset: position of this rank's first example in the global batch.
        some_idle: some rank has no example in the step, although the global batch has enough for all.
        checksum: checksum of the global batch, equal on ranks with the same data (see `structures.checksum`). None,
            on all ranks, if there is nothing to compare.
    """

    data: tuple
    examples: int
    global_examples: int
    offset: int
    checksum: int | None
    some_idle: bool = False


@dataclass(frozen=True)
class Reading:
    """How data is read, whatever it is.

    Attributes:
        global_batch_size: examples of all workers together in one step.
        shuffle: whether by seed and epoch; what that means for each kind of data, `make_source` says.
        seed: of shuffling.
        steps: global batches in an epoch; None: all of the data.
        class_weight: from class number to weight.
        training: whether it is trained on.
        float_dtype: that floating-point data is cast to, such as "float32".
    """

    global_batch_size: int
    shuffle: bool
    seed: int
    steps: int | None
    class_weight: Mapping[int, float] | None
    training: bool
    float_dtype: str

    def warns_of_joining(self, found: int, workers: int) -> bool:
        """Whether joining the user's batches, of which the first has `found` examples, is to be warned of."""
        # A batch for each worker is what scripts for Horovod make: nothing to warn of.
        return self.training and self.global_batch_size not in (found, found * workers)


class Source(Protocol):
    """Training, validation or prediction data as global batches, each shared out to all ranks.

    The order of examples never depends on the number of workers; the shares of ranks 0, 1, ... laid
    one after the other are the batch that a single worker gets.
    """

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch; None if known only after reading to the end."""

    @property
    def examples(self) -> int | None:
        """Examples in a pass over the data; None if known only after reading to the end."""

    @property
    def element(self) -> Any:
        """One example's signature: `data` with a `structures.Spec` (shape, dtype) for each array.

        Ranks whose elements are equal can train together. Plain tuples, dicts and strings, so that
        ranks can compare it (as JSON too).
        """

    @property
    def agreed(self) -> bool:
        """Whether all lengths are known up front, so that ranks need no agreement step by step."""

    @property
    def reading(self) -> Reading:
        """How it is read."""

    @property
    def unrepeatable(self) -> str:
        """Why another process that runs the same script may not read the same once more; "": it does."""

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        """Return this rank's shares of the global batches of one epoch (counted from 0), in order.

        Raises:
            UsageError: the global batch is smaller than the number of workers.
        """

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        """Be as after `epochs` were read, one after the other; what their order depends on is read, if anything."""


def split(examples: int, rank: int, size: int) -> tuple[int, int]:
    """Return begin and end of a rank's contiguous part of `examples`; parts differ by at most one."""
    return rank * examples // size, (rank + 1) * examples // size


def check_workers(global_batch_size: int, size: int) -> None:
    """Raise UsageError if some of `size` workers would never have anything to do."""
    if global_batch_size < size:
        raise UsageError(
            f"global_batch_size {global_batch_size} is smaller than the number of workers, {size}: "
            f"some would never train. Use at least {size}, or fewer workers."
        )


def warn_of_too_few(steps: int, found: int) -> None:
    """Warn that an epoch ended before `steps` batches were read, as Keras does."""
    warn_user(
        f"the data ran out: the epoch ends after {found} of {steps} steps, and the next one "
        "begins a new pass. Lower steps_per_epoch (validation_steps, steps) to the number of "
        "batches in a pass, or repeat the data."
    )


def warn_of_joining(name: str, found: int, global_batch_size: int) -> None:
    """Warn that the user's batches, of which the first has `found` examples, are not the global ones."""
    warn_user(
        f"The first batch of the {name} has {found} examples, so its batches are joined and cut to global_batch_size "
        f"{global_batch_size}: plain Keras would train on them as they come."
    )


def find_share(examples: int, rank: int, size: int) -> tuple[int, int, int]:
    """Return (begin, end, examples) of a rank: begin..end is never empty, `examples` can be 0.

    An idle rank gets the batch's first example to run with.
    """
    begin, end = split(examples, rank, size)
    return (begin, end, end - begin) if end > begin else (0, 1, 0)
