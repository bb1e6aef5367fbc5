"""keras.utils.PyDataset as a source: items by index, so that a rank requests only those that hold its examples.

Keras's items are batches, all equally long except the last. If an item is no longer than a rank's share
(global_batch_size / workers), each rank calls `__getitem__` for its own part of them only. Items as long as the global
batch are requested by every rank, which takes its rows. If items are not equally long, or never end, every rank
requests all of them, in order. So it does if the dataset says, in the attribute `hvdtrain_items_are_batches`, that its
items are the global batches, of any length.

Items that draw random numbers, from a global generator or one that the dataset holds (`random_generators`), draw them
by seed, pass and index, on whichever rank.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.data import structures
from hvdtrain.data.class_weight import apply_class_weight, weighted_element
from hvdtrain.data.indexed import KnownSource, Order, Slot
from hvdtrain.data.random_generators import drawing_from, generators_in
from hvdtrain.data.share import ReadOptions, Share, warn_of_joining
from hvdtrain.data.streams import LOOKED_AT, Stream, as_data, common_element, read_batch
from hvdtrain.errors import UsageError, warn_user


def is_py_dataset(value: Any) -> bool:
    """Whether `value` is a keras.utils.PyDataset; does not import Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, keras.utils.PyDataset)


@dataclass(frozen=True)
class Items:
    """The items of a PyDataset, as Keras passes them on."""

    dataset: Any

    @property
    def name(self) -> str:
        return f"PyDataset {type(self.dataset).__name__}"

    @property
    def count(self) -> int | None:
        """Number of items; None if they never end.

        Raises:
            UsageError: If the dataset defines no length.
        """
        try:
            count = self.dataset.num_batches
        except NotImplementedError:
            raise UsageError(
                f"the {self.name} has no length: define __len__ or num_batches (None for one that "
                "never ends)."
            ) from None
        return None if count is None else int(count)

    @property
    def are_batches(self) -> bool:
        """Whether they are the global batches, whatever their lengths."""
        return getattr(self.dataset, "hvdtrain_items_are_batches", False)

    def __getitem__(self, index: int) -> Any:
        # As in Keras: train_step gets a single array as (x,); a dict stays a dict.
        item = self.dataset[index]
        return item if isinstance(item, dict | list | tuple) else (item,)

    def in_order(self, order: Iterable[int], seed: tuple[int, ...]) -> Iterator[Any]:
        """Yield the items with these indices, made by the dataset's `workers` threads, never more than that many ahead.

        `use_multiprocessing` also means threads: to fork a process that runs TensorFlow and MPI is not safe.

        If the first item draws random numbers, from Python's or NumPy's global generator or from one that the dataset
        holds, those of each item depend on `seed` and its index, not on the items made before. So ranks that make other
        items draw the same numbers for an item, and afterwards, in on_epoch_end. As threads share the generators, one
        item is made at a time then.
        """
        held = generators_in(self.dataset)

        def seeded(index: int) -> Any:
            with drawing_from(*seed, index, held=held):
                return self[index]

        order = iter(order)
        for index in itertools.islice(order, 1):
            with drawing_from(*seed, index, held=held) as draws:
                first, is_random = self[index], draws()
            yield first
            workers = self.dataset.workers
            if is_random and workers > 1:
                warn_user(
                    f"the {self.name} draws random numbers in __getitem__ from a generator that its workers={workers} "
                    "share, so its items are made one at a time: draw from np.random.default_rng([seed, epoch, index]) "
                    "there, to make several at once"
                )
            yield from map(seeded, order) if is_random else _ahead(self.__getitem__, order, workers)

    def skip(self, epochs: int) -> None:
        """Let the dataset change as over `epochs` epochs, without making an item."""
        for _ in range(epochs):
            self.dataset.on_epoch_begin()
            self.dataset.on_epoch_end()


def py_dataset_stream(items: Items, reading: ReadOptions) -> Stream:
    """Return the stream of all items, shuffled by seed and pass if `reading.shuffle`."""
    count = items.count
    first = range(LOOKED_AT if count is None else min(LOOKED_AT, count))

    def read(number: int) -> Iterator[Any]:
        items.dataset.on_epoch_begin()
        order: Iterable[int] = itertools.count()
        if count is not None:
            order = Order(count, reading.shuffle, reading.seed).of(number).tolist()
        yield from items.in_order(order, (reading.seed, number))
        items.dataset.on_epoch_end()

    return Stream(
        name=items.name,
        open=read,
        element=lambda: common_element(
            map(items.__getitem__, first), items.name, reading.float_dtype
        ),
        endless=count is None,
        whole=items.are_batches,
        steps=count if items.are_batches else None,
        skip=items.skip,
        reset=items.dataset.on_epoch_end,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ItemSource(KnownSource):
    """A PyDataset of equally long items as a `Source`.

    The first global batch of an epoch carries the checksum of the item in which it begins, which every rank requests.
    So a dataset that shuffles itself in on_epoch_end differently on each rank is noticed.

    Attributes:
        items: Items of the dataset.
        item_length: Number of examples in each item but the last.
        given: Signature of an example, without its class weight.
    """

    items: Items
    item_length: int
    given: Any

    @property
    def element(self) -> Any:
        return weighted_element(self.given, self.reading)

    def sample(self) -> dict[str, list[float | str]]:
        # Items are compared as they are read: requesting one beforehand would cost as much.
        return {}

    def numbers(self, epoch: int, step: int, rank: int, size: int) -> list[int]:
        return []  # Unknown: the dataset may shuffle itself.

    def epoch(self, epoch: int, rank: int, size: int, begin: int = 0) -> Iterator[Share]:
        if self.reading.warns_of_joining(self.item_length, size):
            warn_of_joining(self.items.name, self.item_length, self.reading.global_batch_size)
        return super().epoch(epoch, rank, size, begin)

    def reset(self) -> None:
        self.items.dataset.on_epoch_end()

    def skip(self, epochs: Sequence[int], rank: int, size: int) -> None:
        self.items.skip(len(epochs))

    def _shares(self, slots: Sequence[Slot]) -> Iterator[Share]:
        order = self.order(-(-self.pass_length // self.item_length))
        wanted = [list(self._pieces(order, slot.begin, slot.end)) for slot in slots]
        first = slots[0].begin - slots[0].offset
        compared = next(self._pieces(order, first, first + 1)).whole
        seed = (self.reading.seed, first // self.pass_length)
        data = self._read([compared, *itertools.chain(*wanted)], seed)
        checksum: int | None = structures.checksum(next(data))
        bare = structures.is_bare(self.given)
        for slot, pieces in zip(slots, wanted, strict=True):
            rows = structures.concatenate(list(itertools.islice(data, len(pieces))))
            rows = apply_class_weight(rows, self.reading, self.items.name)
            yield slot.share(structures.as_given(rows, bare), checksum)
            checksum = None
        next(data, None)  # Runs to the end, where on_epoch_end is called.

    def _pieces(self, order: Order, begin: int, end: int) -> Iterator["_Piece"]:
        """Yield the parts of items that make up positions begin..end of one pass."""
        number, first = divmod(begin, self.pass_length)
        last = first + end - begin
        items = order.of(number)
        lengths = np.minimum(self.item_length, self.pass_length - items * self.item_length)
        ends = np.cumsum(lengths)
        place = int(np.searchsorted(ends, first, side="right"))
        while first < last:
            start, stop = int(ends[place] - lengths[place]), min(last, int(ends[place]))
            yield _Piece(int(items[place]), int(lengths[place]), first - start, stop - start)
            first, place = stop, place + 1

    def _read(self, pieces: Sequence["_Piece"], seed: tuple[int, ...]) -> Iterator[tuple]:
        """Yield the rows of each piece; an item with several consecutive pieces is requested once."""
        self.items.dataset.on_epoch_begin()
        order = [index for index, _ in itertools.groupby(piece.index for piece in pieces)]
        found = self.items.in_order(order, seed)
        for index, same in itertools.groupby(pieces, key=lambda piece: piece.index):
            data = read_batch(
                next(found), f"item {index} of the {self.items.name}", self.reading.float_dtype
            )
            for piece in same:
                self._require_length(piece, structures.count_examples(data, self.items.name))
                yield structures.cut(data, piece.begin, piece.end)
        self.items.dataset.on_epoch_end()

    def _require_length(self, piece: "_Piece", found: int) -> None:
        if found != piece.length:
            raise UsageError(
                f"item {piece.index} of the {self.items.name} has {found} examples, not "
                f"{piece.length}: every item but the last must be as long as the first, "
                f"{self.item_length}. If they differ in length, pass a function that yields them "
                "one by one; every rank then reads all of them."
            )


@dataclass(frozen=True)
class _Piece:
    """Rows begin..end of the item `index`, which has `length` examples."""

    index: int
    length: int
    begin: int
    end: int

    @property
    def whole(self) -> "_Piece":
        return replace(self, begin=0, end=self.length)


def py_dataset_source(items: Items, reading: ReadOptions) -> ItemSource | None:
    """Return the source of a PyDataset; None unless its first two items and the last show equal lengths."""
    count = items.count
    if not count or items.are_batches:
        return None
    looked_at = [items[index] for index in sorted({0, min(1, count - 1), count - 1})]
    given = common_element(looked_at, items.name, reading.float_dtype)
    lengths = [
        structures.count_examples(as_data(item, items.name), items.name) for item in looked_at
    ]
    if len(set(lengths[:-1])) > 1 or not 0 < lengths[-1] <= lengths[0] or structures.varies(given):
        return None
    return ItemSource(
        items=items,
        item_length=lengths[0],
        given=given,
        pass_length=(count - 1) * lengths[0] + lengths[-1],
        reading=reading,
    )


def _ahead(get: Callable[[int], Any], order: Iterable[int], workers: int) -> Iterator[Any]:
    """Yield `get(i)` for each i in order, made by `workers` threads, never more than that many ahead."""
    if workers <= 1:
        yield from map(get, order)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="hvdtrain-items")
    pending: deque[Future[Any]] = deque()
    try:
        for index in order:
            pending.append(pool.submit(get, index))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
