"""Streams of Python: PyDataset, iterators, iterables and functions that return them."""

import inspect
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.data import nested
from hvdtrain.data.streams import Stream, as_data
from hvdtrain.errors import UsageError

FOREIGN = ("torch", "grain", "datasets")
"""Packages whose loaders are iterable, but shuffle and shard by rules of their own."""


def is_py_dataset(value: Any) -> bool:
    """Whether it is a keras.utils.PyDataset; Keras is not imported to find out."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, keras.utils.PyDataset)


def is_readable(value: Any) -> bool:
    """Whether it is an iterator or iterable of batches, or a function that returns one."""
    if any(cls.__module__.split(".")[0] in FOREIGN for cls in type(value).__mro__):
        return False
    return isinstance(value, Iterable) or _is_function(value)


def py_dataset_stream(dataset: Any, *, shuffle: bool, seed: int, float_dtype: str) -> Stream:
    """A PyDataset, its batches in an order by seed and pass where `shuffle`.

    With `workers` above 1 its items are made by that many threads (`use_multiprocessing` too: to
    fork a process in which TensorFlow and MPI run is not safe). on_epoch_begin and on_epoch_end
    are called around each pass.
    """
    try:
        endless = dataset.num_batches is None
    except NotImplementedError:
        raise UsageError(
            f"the PyDataset {type(dataset).__name__} has no length: define __len__ or num_batches "
            "(None for one that never ends)."
        ) from None

    def read(number: int) -> Iterator[Any]:
        dataset.on_epoch_begin()
        order: Iterable[int] = itertools.count()
        if not endless:
            length = int(dataset.num_batches)
            rng = np.random.default_rng([seed, number])
            order = rng.permutation(length).tolist() if shuffle else range(length)
        yield from _items(dataset.__getitem__, order, dataset.workers)
        dataset.on_epoch_end()

    return Stream(
        name=f"PyDataset {type(dataset).__name__}",
        open=read,
        element=lambda: _first_element([dataset[0]], "PyDataset", float_dtype),
        endless=endless,
    )


def python_stream(value: Any, *, float_dtype: str) -> Stream:
    """Batches of an iterator (read once), an iterable or a function (opened anew for each pass)."""
    name = type(value).__name__
    if isinstance(value, Iterator):
        once = _Once(value, name, float_dtype)
        return Stream(name, open=once.open, element=once.element, once=True)
    if _is_function(value):
        name = f"function {getattr(value, '__name__', 'given')}"

    def start() -> Iterator[Any]:
        batches = value() if _is_function(value) else value
        if not isinstance(batches, Iterable):
            raise UsageError(
                f"the {name} returned a {type(batches).__name__}; it must return an iterable of "
                "batches, or be a generator function."
            )
        return iter(batches)

    return Stream(
        name,
        open=lambda number: start(),
        element=lambda: _first_element(start(), name, float_dtype),
    )


class _Once:
    """An iterator, which has one pass; its first batch is looked at and put back."""

    def __init__(self, iterator: Iterator[Any], name: str, float_dtype: str) -> None:
        self.batches: Iterator[Any] | None = iterator
        self.name = name
        self.float_dtype = float_dtype
        self.first: Any = None

    def element(self) -> Any:
        if self.first is None:
            assert self.batches is not None
            head = list(itertools.islice(self.batches, 1))
            self.batches = itertools.chain(head, self.batches)
            self.first = _first_element(head, self.name, self.float_dtype)
        return self.first

    def open(self, number: int) -> Iterator[Any]:
        if self.batches is None:
            raise UsageError(
                f"the {self.name} came to its end, and it can be read only once. Pass the function "
                "that makes it (not its result), which is then called for each epoch; or "
                "fewer epochs or steps_per_epoch."
            )
        self.element()
        batches, self.batches = self.batches, None
        return batches


def _first_element(batches: Iterable[Any], name: str, float_dtype: str) -> Any:
    for batch in batches:
        return nested.spec(as_data(batch, f"the first batch of the {name}"), float_dtype)
    raise UsageError(f"the {name} is empty: it gave no batch.")


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, partial)


def _items(get: Callable[[int], Any], order: Iterable[int], workers: int) -> Iterator[Any]:
    """`get(i)` for each i in order, made by `workers` threads, never more than that many ahead."""
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
