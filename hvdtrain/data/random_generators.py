"""Random generators that data may draw from: Python's and NumPy's global ones, and those that an object holds.

All threads of a process share the global ones. In the attributes of an object (`self.rng` of a PyDataset) NumPy's,
Python's, TensorFlow's and Keras's generators are found, and those in objects that an attribute holds, such as the
augmentation layers of Keras. A generator in a global variable or a closure is not.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

IN_USE = threading.Lock()
"""Held while the global generators stand at a state that is not theirs, so that no other thread saves it as such."""
CONTAINER = 100
"""Maximum number of values in a list or dict that is searched; longer ones hold data."""
DEPTH = 4
"""How many objects deep to search."""


@dataclass(frozen=True)
class RandomGenerator:
    """Access to a generator.

    Attributes:
        state: Returns its state.
        restore: Sets its state.
        seed: Sets its state to one that depends on these numbers only.
    """

    state: Callable[[], Any]
    restore: Callable[[Any], None]
    seed: Callable[[Sequence[int]], None]

    def comparable(self) -> bytes:
        """Return the state in a form that can be compared."""
        return pickle.dumps(self.state())


PYTHON = RandomGenerator(
    random.getstate, random.setstate, lambda numbers: random.seed(str(tuple(numbers)))
)
NUMPY = RandomGenerator(
    np.random.get_state,
    np.random.set_state,
    lambda numbers: np.random.seed(np.random.SeedSequence(list(numbers)).generate_state(8)),
)


def comparable(held: Sequence[RandomGenerator] = ()) -> list[bytes]:
    """Return the states of the global generators, and of others, in a form that can be compared."""
    return [one.comparable() for one in (PYTHON, NUMPY, *held)]


@contextmanager
def drawing_from(*seed: int, held: Sequence[RandomGenerator] = ()) -> Iterator[Callable[[], bool]]:
    """Seed the global generators for this block; afterwards they continue as if it had not been.

    Args:
        seed: The seed.
        held: Other generators, for which the same is done.

    Yields:
        A function that returns whether a number has been drawn in the block.
    """
    seeds = [seed, seed, *((*seed, number) for number in range(len(held)))]
    with IN_USE:
        before = [(one, one.state()) for one in (PYTHON, NUMPY, *held)]
        for (one, _), own in zip(before, seeds, strict=True):
            one.seed(own)
        begun = comparable(held)
        try:
            yield lambda: comparable(held) != begun
        finally:
            for one, state in before:
                one.restore(state)


def generators_in(owner: Any) -> list[RandomGenerator]:
    """Return the generators in the attributes of `owner`, each once, in the order of the attributes."""
    return list(_found(vars(owner), DEPTH, set()))


def _found(value: Any, depth: int, seen: set[int]) -> Iterator[RandomGenerator]:
    if id(value) in seen:
        return
    seen.add(id(value))
    known = _access(value)
    if known is not None:
        yield known
    elif depth:
        for inner in _parts(value):
            yield from _found(inner, depth - 1, seen)


def _parts(value: Any) -> list[Any]:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(value, keras.Model) and value.compiled:
        return []  # The model that is trained: its seeds are not the data's.
    if keras is not None and isinstance(value, keras.Layer):
        return [one for one in value.variables if "seed_generator_state" in one.path]
    if isinstance(value, dict | list | tuple):
        inside = value.values() if isinstance(value, dict) else value
        return list(inside) if len(value) <= CONTAINER else []
    if isinstance(value, type | ModuleType | FunctionType | MethodType):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _access(value: Any) -> RandomGenerator | None:
    keras, tf = sys.modules.get("keras"), sys.modules.get("tensorflow")
    if isinstance(value, np.random.Generator):
        return _of_numpy(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return _of_numpy(value._bit_generator)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return RandomGenerator(
            value.getstate, value.setstate, lambda seed: value.seed(str(tuple(seed)))
        )
    if keras is not None and isinstance(value, keras.random.SeedGenerator):
        return _of_variable(value.state)
    if keras is not None and isinstance(value, keras.Variable):
        return _of_variable(value) if "seed_generator_state" in value.path else None
    if tf is not None and isinstance(value, tf.random.Generator):
        return _of_variable(value.state)
    return None


def _of_numpy(bits: Any) -> RandomGenerator:
    def restore(state: Any) -> None:
        bits.state = state

    def seed(numbers: Sequence[int]) -> None:
        bits.state = type(bits)(np.random.SeedSequence(list(numbers))).state

    return RandomGenerator(lambda: bits.state, restore, seed)


def _of_variable(variable: Any) -> RandomGenerator:
    def state() -> np.ndarray:
        return np.array(variable.numpy())

    def seed(numbers: Sequence[int]) -> None:
        kind = state()
        drawn = np.random.SeedSequence(list(numbers)).generate_state(kind.size)
        variable.assign(drawn.reshape(kind.shape).astype(kind.dtype))

    return RandomGenerator(state, variable.assign, seed)
