"""Data that is read in order: batches of any size in, shares of global batches out.

**Every rank reads the whole stream** and keeps its part: where an example lies is known only by
reading up to it, and a stream per rank (a list of files each, `Dataset.shard`) would make the
order and the last batch depend on the number of workers. Decoding then costs each rank what it
costs one worker; where that is too slow, pass arrays (memory-mapped ones too), of which each rank
reads only its share.

At most one global batch and one batch of the stream are in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdtrain.data import nested
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.class_weight import apply_class_weight
from hvdtrain.data.share import Share, check_workers, find_share
from hvdtrain.errors import UsageError


@dataclass(frozen=True, eq=False)
class Stream:
    """Something that can be read in passes.

    name: what the user passed, for messages.
    open: pass number -> its batches. Raises UsageError if there is no such pass.
    element: signature of one example, found without disturbing the passes.
    endless: whether a pass is known never to end.
    once: whether there is but one pass, which cannot be begun anew.
    steps, examples: in a pass, None where unknown.
    """

    name: str
    open: Callable[[int], Iterator[Any]]
    element: Callable[[], Any]
    endless: bool = False
    once: bool = False
    steps: int | None = None
    examples: int | None = None


@dataclass(eq=False)
class StreamSource:
    """A `Stream` as a `Source`.

    Without `steps` an epoch is one pass. With `steps` the reading goes on across epochs; a pass
    that ends early ends its epoch, and the next epoch begins the next pass: such a source knows
    what was read before, so its epochs are to be asked for in order. Epoch 0 begins anew, if it
    can: evaluation reads the same batches each time.
    """

    stream: Stream
    global_batch_size: int
    steps: int | None
    class_weight: Mapping[int, float] | None
    float_dtype: str
    passes: int = field(default=0, init=False)  # opened so far, with `steps`
    reading: Iterator["GlobalBatch"] = field(default_factory=lambda: iter(()), init=False)

    agreed: ClassVar[bool] = False

    @property
    def steps_per_epoch(self) -> int | None:
        return self.steps or self.stream.steps

    @property
    def examples(self) -> int | None:
        return None if self.steps else self.stream.examples

    @property
    def element(self) -> Any:
        element = self.stream.element()
        if self.class_weight is not None and len(element) == 2:
            element = (*element, nested.Spec((), self.float_dtype))
        return element

    def epoch(self, epoch: int, rank: int, size: int) -> Iterator[Share]:
        check_workers(self.global_batch_size, size)
        if epoch == 0 and not self.stream.once:
            self.passes, self.reading = 0, iter(())
        batches = self._next_steps(self.steps) if self.steps else self._pass(epoch)
        return (batch.share(rank, size) for batch in batches)

    def _pass(self, number: int) -> Iterator["GlobalBatch"]:
        empty = True
        for batch in global_batches(self._batches(number), self.global_batch_size):
            empty = False
            yield batch
        if empty:
            raise UsageError(f"the {self.stream.name} is empty: it gave no batch.")

    def _next_steps(self, steps: int) -> Iterator["GlobalBatch"]:
        for step in range(steps):
            batch = next(self.reading, None)
            if batch is None and step == 0:
                self.reading = self._pass(self.passes)
                self.passes += 1
                batch = next(self.reading)
            if batch is None:
                return
            yield batch

    def _batches(self, number: int) -> Iterator[tuple]:
        for index, batch in enumerate(self.stream.open(number)):
            where = f"batch {index} of the {self.stream.name}"
            data = nested.cast_floats(as_data(batch, where), self.float_dtype)
            if nested.count_examples(data, where):
                yield apply_class_weight(data, self.class_weight, self.float_dtype, where)


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Consecutive examples, in the pieces that they came in."""

    pieces: list[tuple]
    examples: int

    def share(self, rank: int, size: int) -> Share:
        begin, end, examples = find_share(self.examples, rank, size)
        parts = []
        start = 0
        for piece in self.pieces:
            stop = start + nested.count_examples(piece, "")
            if start < end and begin < stop:
                parts.append(nested.cut(piece, max(begin - start, 0), end - start))
            start = stop
        return Share(nested.concatenate(parts), examples, self.examples, begin, self.checksum())

    def checksum(self) -> int:
        value = 0
        for piece in self.pieces:
            value = nested.checksum(piece, value)
        return value


def global_batches(batches: Iterator[tuple], size: int) -> Iterator[GlobalBatch]:
    """Join and cut batches of any sizes into batches of `size` examples; the last can be smaller.

    Raises:
        UsageError: batches that meet in one global batch have different shapes or types.
    """
    pieces: list[tuple] = []
    waiting = 0
    for batch in batches:
        length = nested.count_examples(batch, "")
        begin = 0
        while begin < length:
            end = min(length, begin + size - waiting)
            pieces.append(nested.cut(batch, begin, end))
            waiting += end - begin
            begin = end
            if waiting == size:
                yield _joined(pieces, waiting)
                pieces, waiting = [], 0
    if pieces:
        yield _joined(pieces, waiting)


def _joined(pieces: list[tuple], examples: int) -> GlobalBatch:
    # Checked here, on the whole batch, so that all ranks stop together and not only those whose
    # share is affected.
    first = nested.spec(pieces[0])
    for piece in pieces[1:]:
        other = nested.spec(piece)
        if other != first:
            raise UsageError(
                f"batches of one stream differ: one has examples of {describe(first)}, another of "
                f"{describe(other)}. Pad them to one shape."
            )
    return GlobalBatch(pieces, examples)


def describe(element: Any) -> str:
    """An element in one line, for messages."""
    if isinstance(element, nested.Spec):
        return str(element)
    if isinstance(element, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in element.items()) + "}"
    return "(" + ", ".join(describe(item) for item in element) + ")"


def as_data(batch: Any, where: str) -> tuple:
    """One batch of a stream as a data tuple (x[, y[, sample_weight]]) of NumPy arrays."""
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, tuple) and not isinstance(batch, dict) and not hasattr(batch, "shape"):
        raise UsageError(
            f"{where} is a {type(batch).__name__}. It must be a tuple of arrays (x, y) or "
            "(x, y, sample_weight), or x alone as an array or a dict."
        )
    try:
        return convert(unpack(batch))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
