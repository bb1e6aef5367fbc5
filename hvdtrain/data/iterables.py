"""Python streams: iterators, iterables and functions that return them."""

import inspect
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from hvdtrain.data.streams import LOOKED_AT, Stream, common_element
from hvdtrain.errors import UsageError

FOREIGN = ("torch", "grain", "datasets")
"""Packages whose loaders are iterable, but shuffle and shard by their own rules."""


def is_readable(value: Any) -> bool:
    """Whether `value` is an iterator or iterable of batches, or a function that returns one."""
    if any(cls.__module__.split(".")[0] in FOREIGN for cls in type(value).__mro__):
        return False
    return isinstance(value, Iterable) or _is_function(value)


def python_stream(value: Any, *, float_dtype: str) -> Stream:
    """Return the stream of an iterator (read once), or of an iterable or function (opened again for each pass).

    Args:
        value: Iterator, iterable or function without arguments.
        float_dtype: Dtype to which floating-point data will be cast.

    Raises:
        UsageError: During reading: if a function returned something that is not iterable, or an iterator is exhausted.
    """
    name = type(value).__name__
    if isinstance(value, Iterator):
        once = _Once(value, name, float_dtype)
        return Stream(
            name,
            open=once.open,
            element=once.element,
            once=True,
            unrepeatable=f"the {name} cannot be read a second time: pass the function that creates it, not its result",
        )
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
        element=lambda: common_element(start(), name, float_dtype),
    )


class _Once:
    """An iterator, which has only one pass; its first batches are inspected and put back."""

    def __init__(self, iterator: Iterator[Any], name: str, float_dtype: str) -> None:
        self.batches: Iterator[Any] | None = iterator
        self.name = name
        self.float_dtype = float_dtype
        self.first: Any = None

    def element(self) -> Any:
        if self.first is None:
            assert self.batches is not None
            head = list(itertools.islice(self.batches, LOOKED_AT))
            self.batches = itertools.chain(head, self.batches)
            self.first = common_element(head, self.name, self.float_dtype)
        return self.first

    def open(self, number: int) -> Iterator[Any]:
        if self.batches is None:
            raise UsageError(
                f"the {self.name} is exhausted, and it can be read only once. Pass the function "
                "that creates it (not its result), which is then called once per epoch; or use "
                "fewer epochs or a smaller steps_per_epoch."
            )
        self.element()
        batches, self.batches = self.batches, None
        return batches


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, partial)
