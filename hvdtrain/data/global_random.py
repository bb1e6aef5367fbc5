"""The global random generators of Python and NumPy, which all threads of a process share."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.data.held_random import HeldGenerator

IN_USE = threading.Lock()
"""Held while the generators stand at a state that is not theirs, so that no other thread saves it as such."""


def states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generator."""
    return random.getstate(), np.random.get_state()


def set_states(python: Any, numpy: Any) -> None:
    """Set the states of Python's and NumPy's generator."""
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def drawing_from(*seed: int, held: Sequence[HeldGenerator] = ()) -> Iterator[Callable[[], bool]]:
    """Seed both generators for this block; afterwards they continue as if it had not been.

    Args:
        seed: The seed.
        held: Other generators, for which the same is done.

    Yields:
        A function that returns whether a number has been drawn in the block.
    """

    def now() -> tuple[Any, ...]:
        return (*comparable(), *(one.comparable() for one in held))

    with IN_USE:
        before, held_before = states(), [one.state() for one in held]
        random.seed(str(seed))
        np.random.seed(np.random.SeedSequence(seed).generate_state(8))
        for number, one in enumerate(held):
            one.seed((*seed, number))
        begun = now()
        try:
            yield lambda: now() != begun
        finally:
            set_states(*before)
            for one, state in zip(held, held_before, strict=True):
                one.restore(state)


def comparable() -> tuple[Any, ...]:
    """Return the states in a form that can be compared."""
    python, (kind, numbers, *rest) = states()
    return (python, kind, numbers.tobytes(), *rest)
