"""Gives all ranks the same random numbers where a script asks for a generator without a seed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np


@contextlib.contextmanager
def same_seeds(seed: int) -> Iterator[None]:
    """In this block, seed what would otherwise be seeded by the operating system, on each rank differently.

    These are `np.random.default_rng()`, `np.random.seed()` and `random.seed()` without an argument.

    Args:
        seed: The same on all ranks; each call without a seed gets another one that follows from it.
    """
    numbers = itertools.count(seed)
    with (
        mock.patch.object(np.random, "default_rng", _seeded(np.random.default_rng, numbers)),
        mock.patch.object(np.random, "seed", _seeded(np.random.seed, numbers)),
        mock.patch.object(random, "seed", _seeded(random.seed, numbers)),
    ):
        yield


def _seeded(function: Callable[..., Any], numbers: Iterator[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function(next(numbers) if seed is None else seed, *args, **kwargs)

    return call
