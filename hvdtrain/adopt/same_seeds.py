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

from hvdtrain.adopt.notes import Tell


@contextlib.contextmanager
def same_seeds(seed: int, tell: Tell) -> Iterator[None]:
    """In this block, seed what would otherwise be seeded by the operating system, on each rank differently.

    These are `np.random.default_rng()`, `np.random.seed()` and `random.seed()` without an argument.

    Args:
        seed: The same on all ranks; each call without a seed gets another one that follows from it.
        tell: Told of each call.
    """
    numbers = itertools.count(seed)
    with (
        mock.patch.object(np.random, "default_rng", _seeded(np.random.default_rng, numbers, tell)),
        mock.patch.object(np.random, "seed", _seeded(np.random.seed, numbers, tell)),
        mock.patch.object(random, "seed", _seeded(random.seed, numbers, tell)),
    ):
        yield


def _seeded(function: Callable[..., Any], numbers: Iterator[int], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        if seed is None:
            seed = next(numbers)
            tell(f"{function.__name__} without a seed", "all workers are given the same seed")
        return function(seed, *args, **kwargs)

    return call
