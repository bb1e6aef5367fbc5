"""What rank 0 does first: download a file, and read what the user types."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import keras

from hvdtrain.adopt.notes import Tell
from hvdtrain.adopt.same_way import SameWay
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.first_rank import first_rank_first


@contextlib.contextmanager
def done_once(tell: Tell, way: SameWay) -> Iterator[None]:
    """In this block, rank 0 downloads a file of `keras.utils.get_file` before the others look for it, and only it reads
    `input()`.

    Args:
        tell: Told of each.
        way: Whether the ranks make the same calls.
    """
    download = cast("Callable[..., Any]", keras.utils.get_file)
    with contextlib.ExitStack() as blocks:
        for module in list(sys.modules.values()):  # Those of keras.datasets hold it under its name.
            if getattr(module, "__dict__", {}).get("get_file") is download:
                first = mock.patch.object(module, "get_file", _on_rank_0_first(download, tell, way))
                blocks.enter_context(first)
        blocks.enter_context(
            mock.patch.object(builtins, "input", _read_by_rank_0(input, tell, way))
        )
        yield


def _on_rank_0_first(download: Callable[..., Any], tell: Tell, way: SameWay) -> Callable[..., Any]:
    @functools.wraps(download)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not way.joins("get_file"):
            return download(*args, **kwargs)
        tell("get_file", "rank 0 downloads the file, before the others look for it")
        found = _of_rank_0(lambda: download(*args, **kwargs))
        return found if ALL_RANKS.rank() == 0 else download(*args, **kwargs)

    return call


def _read_by_rank_0(read: Callable[[Any], str], tell: Tell, way: SameWay) -> Callable[[Any], str]:
    def call(prompt: Any = "", /) -> str:
        if not way.joins("input"):
            return read(prompt)
        tell("input", "rank 0 reads the line for all workers")
        return _of_rank_0(lambda: read(prompt))

    return call


def _of_rank_0(work: Callable[[], str]) -> str:
    """Return the result of `work` on rank 0, on all ranks. A collective.

    Raises:
        Exception: On all ranks: what it raises there; on the others, of the built-in type, as scripts catch it.
    """
    result, failed = "", None
    with first_rank_first():
        if ALL_RANKS.rank() == 0:
            try:
                result = work()
            except Exception as error:
                failed = error
    told = [result, *([_built_in(failed).__name__, str(failed)] if failed else [])]
    result, *failure = ALL_RANKS.exchange(told, "once")[0]
    if failed is not None:
        raise failed
    if failure:
        kind, message = failure
        raise getattr(builtins, kind)(message)
    return result


def _built_in(error: Exception) -> type:
    """Return the most special built-in type of an error that takes a message, and no more."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    others = (UnicodeError, BaseExceptionGroup)
    return next(kind for kind in kinds if not issubclass(kind, others))
