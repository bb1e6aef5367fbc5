"""What only one rank may do first: download a file, and read what the user types."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras

from hvdtrain.collectives.consistency import on_first, raise_alike
from hvdtrain.runtime import Rank


@contextlib.contextmanager
def done_once(rank: Rank) -> Iterator[None]:
    """In this block, one rank of each host downloads a file of `keras.utils.get_file`, and rank 0 reads `input()`."""
    if rank.size == 1:
        yield
        return
    download = keras.utils.get_file
    with contextlib.ExitStack() as blocks:
        for module in _users_of(download):
            replaced = _first_of_host(download, rank)
            blocks.enter_context(mock.patch.object(module, "get_file", replaced))
        blocks.enter_context(mock.patch.object(builtins, "input", _asked_on_rank_0(input)))
        yield


def _users_of(function: Callable[..., Any]) -> list[Any]:
    """Return the modules that hold `keras.utils.get_file` (those of keras.datasets) under its name."""
    found = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    return [
        sys.modules[space["__name__"]]
        for space in found
        if space.get("get_file") is function and space.get("__name__") in sys.modules
    ]


def _first_of_host(download: Callable[..., Any], rank: Rank) -> Callable[..., Any]:
    """Return `download`, which the first rank of each host calls first; the others then find the file."""

    @functools.wraps(download)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, failed = None, None
        if rank.local_rank == 0:
            try:
                result = download(*args, **kwargs)
            except Exception as error:
                failed = error
        raise_alike(failed, "keras.utils.get_file")
        return result if rank.local_rank == 0 else download(*args, **kwargs)

    return call


def _asked_on_rank_0(ask: Callable[[Any], str]) -> Callable[[Any], str]:
    def call(prompt: Any = "", /) -> str:
        return str(on_first(lambda: ask(prompt), "input"))

    return call
