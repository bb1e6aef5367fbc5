"""The interface of data sources, and the share of a global batch that a source gives to one rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.errors import UsageError, warn_user


@dataclass(frozen=True)
class Part:
    """The share of each global batch that a process reads.

    Attributes:
        index: Index of the share, from 0.
        count: Number of shares.
    """

    index: int
    count: int


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch.

    Attributes:
        data: What Keras's fit passes to train_step: (x, y), (x, y, sample_weight), (x,), or x alone if it was passed
            alone. Each is a NumPy array, or a nested dict, list or tuple of arrays, with this rank's examples along the
            first dimension. Do not write to them: they may be views of the user's arrays. An idle rank (`examples` is
            0, in a last batch smaller than the number of workers) gets one real example of the global batch, so that it
            can run the step and take part in its collectives; its result has weight zero.
        examples: Number of this rank's examples in the step.
        global_examples: Number of examples of all ranks in the step.
        offset: Position of this rank's first example in the global batch.
        some_idle: Whether some rank has no example in the step, although the global batch has enough for all.
        checksum: Checksum of the global batch, equal on ranks with the same data (see `structures.checksum`). None, on
            all ranks, if there is nothing to compare.
    """

    data: tuple
    examples: int
    global_examples: int
    offset: int
    checksum: int | None
    some_idle: bool = False


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading data of any kind.

    Attributes:
        global_batch_size: Number of examples per step, over all workers.
        shuffle: Whether to shuffle by seed and pass; see `make_source` for each kind of data.
        seed: Seed of the shuffling.
        steps: Number of global batches per epoch; None: all of the data.
        class_weight: Class number -> weight; None: no class weights.
        training: Whether the data is for training.
        float_dtype: Dtype to which floating-point data is cast, such as "float32".
    """

    global_batch_size: int
    shuffle: bool
    seed: int
    steps: int | None
    class_weight: Mapping[int, float] | None
    training: bool
    float_dtype: str

    def warns_of_joining(self, found: int, workers: int) -> bool:
        """Whether to warn that the user's batches, the first of which has `found` examples, are joined."""
        # Scripts for Horovod make batches of one worker's share: nothing to warn of.
        return self.training and self.global_batch_size not in (found, found * workers)


class Source(Protocol):
    """Training, validation or prediction data as global batches, each divided over all ranks.

    The order of examples never depends on the number of workers: the shares of ranks 0, 1, ... together are the batch
    that a single worker gets.
    """

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of global batches per epoch; None if known only after reading to the end."""

    @property
    def examples(self) -> int | None:
        """Number of examples in a pass over the data; None if known only after reading to the end."""

    @property
    def element(self) -> Any:
        """Signature of one example: `Share.data` with a `structures.Spec` (shape, dtype) in place of each array.

        Ranks with equal signatures can train together. It consists of plain tuples, dicts and strings, so that ranks
        can compare it (as JSON too).
        """

    @property
    def agreed(self) -> bool:
        """Whether all lengths are known in advance, so that ranks need not agree step by step."""

    @property
    def reading(self) -> ReadOptions:
        """Settings of the reading."""

    @property
    def unrepeatable(self) -> str:
        """Reason why another process with the same script may read other data or another order; "" if it cannot."""

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        """Yield this rank's shares of the global batches of one epoch, in order.

        Args:
            epoch: Index of the epoch, from 0.
            rank: Index of the reading process.
            size: Number of reading processes.

        Raises:
            UsageError: If the global batch is smaller than the number of workers. During reading: if the data is
                faulty.
        """

    def reset(self) -> None:
        """Prepare for a fit or an evaluation: Keras then calls on_epoch_end of a PyDataset, before its first epoch."""

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        """Bring the source to its state after reading `epochs`, one after the other.

        Reads only what later data depends on.
        """


def split(examples: int, rank: int, size: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's contiguous part of `examples`; the lengths of parts differ by at most one."""
    return rank * examples // size, (rank + 1) * examples // size


def check_workers(global_batch_size: int, size: int) -> None:
    """Raise UsageError if some of `size` workers would never have an example."""
    if global_batch_size < size:
        raise UsageError(
            f"global_batch_size {global_batch_size} is smaller than the number of workers, {size}: "
            f"some would never train. Use at least {size}, or fewer workers."
        )


def warn_of_too_few(steps: int, found: int) -> None:
    """Warn that an epoch ended after `found` of `steps` batches, as Keras does."""
    warn_user(
        f"the data ran out: the epoch ends after {found} of {steps} steps, and the next one "
        "begins a new pass. Lower steps_per_epoch (validation_steps, steps) to the number of "
        "batches in a pass, or repeat the data."
    )


def warn_of_joining(name: str, found: int, global_batch_size: int) -> None:
    """Warn that the user's batches are joined and cut to global batches.

    Args:
        name: Kind of the data.
        found: Number of examples in the first batch.
        global_batch_size: Number of examples per step, over all workers.
    """
    warn_user(
        f"The first batch of the {name} has {found} examples, so its batches are joined and cut to global_batch_size "
        f"{global_batch_size}: plain Keras would train on them as they are."
    )


def find_share(examples: int, rank: int, size: int) -> tuple[int, int, int]:
    """Return (begin, end, examples) of a rank's share of a batch of `examples` examples.

    begin..end is never empty: an idle rank, whose `examples` is 0, gets the batch's first example to run with.
    """
    begin, end = split(examples, rank, size)
    return (begin, end, end - begin) if end > begin else (0, 1, 0)
