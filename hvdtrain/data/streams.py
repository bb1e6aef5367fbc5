"""Data that is read in order: batches of any size become shares of global batches.

If the first batch has global_batch_size examples, the user's batches are the global ones, even short ones, as in plain
Keras; otherwise they are joined and cut to that size. If examples differ in length (the element_spec of a Dataset
contains None, or the first two batches of a generator or PyDataset differ in shape), batches cannot be joined, and are
also used as they come.

**Every rank reads the whole stream** and keeps its part: the batch of an example is known only after reading up to it,
and a stream per rank (its own list of files, `Dataset.shard`) would make the order and the last batch depend on the
number of workers. Decoding therefore costs each rank as much as a single worker. Where that is too slow, use a Dataset
with a shard point (`sharding`), after which each rank has only its own examples, or files, a PyDataset or arrays, of
which each rank reads only its own.

At most one global batch and one batch of the stream are in memory.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from hvdtrain.data import structures
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.class_weight import apply_class_weight, weighted_element
from hvdtrain.data.sharding import ShardPoint, Window
from hvdtrain.data.share import (
    Part,
    ReadOptions,
    Share,
    check_workers,
    find_share,
    warn_of_joining,
    warn_of_too_few,
)
from hvdtrain.errors import UsageError, warn_user

LOOKED_AT = 2
"""Number of batches from which to learn which dimensions vary, as Keras does."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Data that can be read in passes.

    Attributes:
        name: Kind of the user's data, for messages.
        open: Function that returns the batches of the pass with the given index; raises UsageError if there is no such
            pass.
        element: Function that returns the signature of one example, in the structure in which the user gives it (x
            alone is not a tuple), without disturbing the passes. A dimension that varies is None.
        endless: Whether a pass is known never to end.
        once: Whether there is only one pass, which cannot be restarted.
        whole: Whether its batches are the global ones, whatever their lengths.
        steps: Number of global batches in a pass; None if unknown.
        examples: Number of examples in a pass; None if unknown.
        point: Point after which each rank continues with only its own examples, if any.
        skip: Function that affects later passes as reading this many passes would; None: only reading does.
        reset: See `Source.reset`.
        unrepeatable: See `Source.unrepeatable`.
    """

    name: str
    open: Callable[[int], Iterator[Any]]
    element: Callable[[], Any]
    endless: bool = False
    once: bool = False
    whole: bool = False
    steps: int | None = None
    examples: int | None = None
    point: ShardPoint | None = None
    skip: Callable[[int], None] | None = None
    reset: Callable[[], None] = lambda: None
    unrepeatable: str = ""


@dataclass(eq=False)
class StreamSource:
    """A `Stream` as a `Source`.

    Without `steps` an epoch is one pass. With `steps` reading continues across epochs; a pass that ends early ends its
    epoch, and the next epoch begins the next pass. Such a source depends on what was read before, so its epochs must be
    read in order. Epoch 0 starts again, if the stream can: evaluation reads the same batches each time.

    Attributes:
        stream: Stream to read.
        reading: Settings of the reading.
        passes: Number of passes opened so far, with `steps`.
        warned: Whether the user was warned about the sizes of batches.
        shares: Remaining shares of the open pass, with `steps`.
    """

    stream: Stream
    reading: ReadOptions
    passes: int = field(default=0, init=False)
    warned: bool = field(default=False, init=False)
    shares: Iterator[Share] = field(default_factory=lambda: iter(()), init=False)

    agreed: ClassVar[bool] = False

    @property
    def steps_per_epoch(self) -> int | None:
        return self.reading.steps or self.stream.steps

    @property
    def examples(self) -> int | None:
        return self.stream.examples

    @cached_property
    def element(self) -> Any:
        return weighted_element(self.stream.element(), self.reading)

    @property
    def unrepeatable(self) -> str:
        return self.stream.unrepeatable

    @property
    def varies(self) -> bool:
        """Whether examples differ in length, so that batches cannot be joined or cut."""
        return structures.varies(self.element)

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        check_workers(self.reading.global_batch_size, size)
        if epoch == 0 and not self.stream.once:
            self.passes, self.shares = 0, iter(())
        part = Part(rank, size)
        steps = self.reading.steps
        return self._next_steps(steps, part) if steps else self._pass(epoch, part)

    def reset(self) -> None:
        self.stream.reset()

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        if self.stream.skip is not None and not self.reading.steps:
            self.stream.skip(len(epochs))
            return
        for epoch in epochs:
            deque(self.epoch(epoch, rank, size), maxlen=0)

    def _pass(self, number: int, part: Part) -> Iterator[Share]:
        empty = True
        point = self.stream.point
        shares = self._cut(number, part) if point is None else self._own(point, number, part)
        for share in shares:
            empty = False
            yield share
        if empty:
            raise UsageError(f"the {self.stream.name} is empty: it yielded no batch.")

    def _cut(self, number: int, part: Part) -> Iterator[Share]:
        """Yield the rank's shares of global batches that it reads as a whole."""
        batches = self._batches(number)
        bare = structures.is_bare(self.element)
        first = next(batches, None)
        if first is None:
            return
        size = structures.count_examples(first)
        batches = itertools.chain([first], batches)
        if self.stream.whole or self.varies or size == self.reading.global_batch_size:
            found = self._as_they_come(batches)
        else:
            if self.reading.warns_of_joining(size, part.count):
                batches = self._warned_of_joining(batches, size)
            found = global_batches(batches, lambda step: self.reading.global_batch_size)
        for batch in found:
            yield batch.share(part.index, part.count, bare)

    def _own(self, point: ShardPoint, number: int, part: Part) -> Iterator[Share]:
        """Yield the rank's shares from a stream that brings nothing else, because it has a shard point."""
        if self.varies:
            raise UsageError(
                f"the examples of the {self.stream.name} differ in length, so they cannot be cut into batches after "
                "hvdtrain.data.shard: pad them to one shape."
            )
        wrong = f"in the {self.stream.name}, examples were added or dropped after hvdtrain.data.shard: do so before it"

        def window_of(step: int) -> Window:
            window = point.window(step)
            if window is None:
                raise UsageError(f"{wrong} (more came out than went in).")
            return window

        def rows(step: int) -> int:
            window = window_of(step)
            return window.end - window.begin

        bare = structures.is_bare(self.element)
        with point.read_as(part.index, part.count, self.reading.global_batch_size):
            step = 0
            for step, own in enumerate(global_batches(self._batches(number), rows), 1):
                window = window_of(step - 1)
                if own.examples != window.end - window.begin:
                    raise UsageError(f"{wrong} (fewer came out than went in).")
                point.forget(step - 1)
                data = structures.as_given(structures.concatenate(own.pieces), bare)
                yield Share(
                    data, window.examples, window.global_examples, window.begin, window.checksum
                )
            if point.window(step) is not None:
                raise UsageError(f"{wrong} (fewer came out than went in).")

    def _as_they_come(self, batches: Iterator[tuple]) -> Iterator["GlobalBatch"]:
        short = 0
        for batch in batches:
            examples = structures.count_examples(batch)
            if examples > self.reading.global_batch_size and not self.stream.whole:
                other = "" if self.varies else ", or cut them to one size (Dataset.rebatch)"
                raise UsageError(
                    f"a batch of the {self.stream.name} has {examples} examples, more than global_batch_size "
                    f"{self.reading.global_batch_size}. Its batches are used as they are, split "
                    "over the workers: set global_batch_size to the size of the largest "
                    f"batch{other}."
                )
            if self.varies and 0 < short < self.reading.global_batch_size and not self.warned:
                # The last batch may be short in any data, so warn only when another one follows.
                self.warned = True
                warn_user(
                    f"The examples of the {self.stream.name} differ in length, so each of its batches is used as it "
                    f"is, split over the workers: here {short} examples, not global_batch_size "
                    f"{self.reading.global_batch_size}."
                )
            short = examples
            yield GlobalBatch([batch], examples)

    def _warned_of_joining(self, batches: Iterator[tuple], size: int) -> Iterator[tuple]:
        yield next(batches)
        for batch in batches:
            if not self.warned:
                self.warned = True
                warn_of_joining(self.stream.name, size, self.reading.global_batch_size)
            yield batch

    def _next_steps(self, steps: int, part: Part) -> Iterator[Share]:
        for step in range(steps):
            share = next(self.shares, None)
            if share is None and step == 0:
                self.shares = self._pass(self.passes, part)
                self.passes += 1
                share = next(self.shares)
            if share is None:
                warn_of_too_few(steps, step)
                return
            yield share

    def _batches(self, number: int) -> Iterator[tuple]:
        for index, batch in enumerate(self.stream.open(number)):
            where = f"batch {index} of the {self.stream.name}"
            data = read_batch(batch, where, self.reading.float_dtype)
            if structures.count_examples(data, where):
                yield apply_class_weight(data, self.reading, where)


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Consecutive examples, in the pieces in which they arrived."""

    pieces: list[tuple]
    examples: int

    def share(self, rank: int, size: int, bare: bool) -> Share:
        begin, end, examples = find_share(self.examples, rank, size)
        parts = []
        start = 0
        for piece in self.pieces:
            stop = start + structures.count_examples(piece)
            if start < end and begin < stop:
                parts.append(structures.cut(piece, max(begin - start, 0), end - start))
            start = stop
        data = structures.as_given(structures.concatenate(parts), bare)
        return Share(data, examples, self.examples, begin, self.checksum())

    def checksum(self) -> int:
        value = 0
        for piece in self.pieces:
            value = structures.checksum(piece, value)
        return value


def global_batches(
    batches: Iterator[tuple], size_of: Callable[[int], int]
) -> Iterator[GlobalBatch]:
    """Join and cut batches of any size into batches of `size_of(step)` examples; the last one may be smaller.

    Raises:
        UsageError: If batches within one global batch have different shapes or dtypes.
    """
    pieces: list[tuple] = []
    waiting = step = 0
    for batch in batches:
        length = structures.count_examples(batch)
        begin = 0
        while begin < length:
            size = size_of(step)
            end = min(length, begin + size - waiting)
            pieces.append(structures.cut(batch, begin, end))
            waiting += end - begin
            begin = end
            if waiting == size:
                yield _joined(pieces, waiting)
                pieces, waiting, step = [], 0, step + 1
    if pieces:
        yield _joined(pieces, waiting)


def _joined(pieces: list[tuple], examples: int) -> GlobalBatch:
    # Checked on the whole batch, so that all ranks fail together, not only those whose share is affected.
    first = structures.spec(pieces[0])
    for piece in pieces[1:]:
        other = structures.spec(piece)
        if other != first:
            raise UsageError(
                f"batches of one stream differ: one has examples of {describe(first)}, another of "
                f"{describe(other)}. Pad them to one shape. (Shapes may vary where this is known "
                "in advance: in a Dataset whose element_spec has None, or in other data whose "
                "first two batches differ.)"
            )
    return GlobalBatch(pieces, examples)


def describe(element: Any) -> str:
    """Format a signature in one line, for messages."""
    if isinstance(element, structures.Spec):
        return str(element)
    if isinstance(element, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in element.items()) + "}"
    return "(" + ", ".join(describe(item) for item in element) + ")"


def as_data(batch: Any, where: str) -> tuple:
    """Convert one batch of a stream to a data tuple (x[, y[, sample_weight]]) of NumPy arrays.

    Args:
        batch: Batch to convert.
        where: Name of the batch in messages.

    Raises:
        UsageError: If it is not such a batch; names it.
    """
    if isinstance(batch, list):
        batch = tuple(batch)
    if isinstance(batch, tuple) and len(batch) > len(structures.PARTS):
        return convert(batch)
    if not isinstance(batch, tuple) and not isinstance(batch, dict) and not hasattr(batch, "shape"):
        raise UsageError(
            f"{where} is a {type(batch).__name__}. It must be a tuple of arrays (x, y) or "
            "(x, y, sample_weight), or x alone as an array or a dict."
        )
    try:
        return convert(unpack(batch))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def read_batch(batch: Any, where: str, float_dtype: str) -> tuple:
    """Return `as_data` of one batch, in memory and with floats of one dtype."""
    return structures.cast_floats(structures.read(as_data(batch, where)), float_dtype)


def common_element(batches: Iterable[Any], name: str, float_dtype: str) -> Any:
    """Return the signature of an example (see `Stream.element`) from the first LOOKED_AT batches.

    Args:
        batches: Batches of the stream.
        name: Kind of the data, for messages.
        float_dtype: Dtype to which floating-point data will be cast.

    Raises:
        UsageError: If there is no batch, or one is no tuple of arrays.
    """
    specs = []
    for batch in itertools.islice(batches, LOOKED_AT):
        data = as_data(batch, f"the first batch of the {name}")
        bare = not isinstance(batch, list | tuple)
        specs.append(structures.as_given(structures.spec(data, float_dtype), bare))
    if not specs:
        raise UsageError(f"the {name} is empty: it yielded no batch.")
    return structures.common_spec(specs[0], specs[-1])
