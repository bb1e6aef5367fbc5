"""The data of the cases: small, made up, the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from exactness.case import BATCH, Case

MOST = 32
"""Examples of each kind; a case takes the first ones."""
TOKENS, CLASSES, WORDS = 10, 3, 5


def _normal(*shape: int) -> Callable[[Any], np.ndarray]:
    return lambda rng: rng.normal(size=(MOST, *shape)).astype("float32")


def _padded(rng: Any) -> np.ndarray:
    """The first word is never padding."""
    words = rng.integers(1, TOKENS, (MOST, WORDS))
    return np.where(np.arange(WORDS) < rng.integers(1, WORDS + 1, (MOST, 1)), words, 0)


def _one_hot(rng: Any) -> np.ndarray:
    return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, MOST)]


def _some_ignored(rng: Any) -> np.ndarray:
    """More from batch to batch, and all of the first rank's in the last full one."""
    labels = rng.integers(0, CLASSES, MOST)
    return np.where(np.arange(MOST) % BATCH < 2 * (np.arange(MOST) // BATCH), -1, labels)


def _with_nan(rng: Any) -> np.ndarray:
    numbers = rng.normal(size=(MOST, 4)).astype("float32")
    numbers[10] = np.nan
    return numbers


KINDS: Mapping[str, Callable[[Any], Any]] = {
    # x
    "vectors": _normal(4),
    "vectors with a nan": _with_nan,
    "small vectors": lambda rng: 1e-3 * _normal(4)(rng),
    "signals": _normal(6, 2),
    "images": _normal(6, 6, 2),
    "volumes": _normal(4, 4, 4, 1),
    "films": _normal(3, 4, 4, 1),
    "waves": _normal(64),
    "words": lambda rng: rng.integers(1, TOKENS, (MOST, WORDS)),
    "padded words": _padded,
    "texts": lambda rng: np.array(["red", "green", "blue"], object)[rng.integers(0, 3, (MOST, 1))],
    "two inputs": lambda rng: {"a": _normal(4)(rng), "b": _normal(3)(rng)},
    # y
    "numbers": _normal(2),
    "positive numbers": lambda rng: rng.uniform(0.1, 2, (MOST, 2)).astype("float32"),
    "one number": _normal(1),
    "flags": lambda rng: rng.integers(0, 2, (MOST, 1)),
    "signs": lambda rng: 2 * rng.integers(0, 2, (MOST, 1)) - 1,
    "classes": lambda rng: rng.integers(0, CLASSES, MOST),
    "some ignored": _some_ignored,
    "one-hot": _one_hot,
    "probabilities": lambda rng: rng.dirichlet(np.ones(CLASSES), MOST).astype("float32"),
    "tags": lambda rng: rng.integers(0, CLASSES, (MOST, WORDS)),
    "numbers of words": _normal(WORDS, 2),
    "labels": lambda rng: rng.integers(1, CLASSES, (MOST, 2)),
    "masks": lambda rng: rng.integers(0, 2, (MOST, 6, 6, 1)).astype("float32"),
    "two outputs": lambda rng: {"one": _normal(2)(rng), "other": _normal(1)(rng)},
    # sample weights
    "of examples": lambda rng: rng.uniform(0.2, 2, MOST).astype("float32"),
    "zero for half of a batch": lambda rng: (np.arange(MOST) % BATCH >= 4).astype("float32"),
    "zero for a batch": lambda rng: (np.arange(MOST) // BATCH != 1).astype("float32"),
    "zero for the last batch": lambda rng: (np.arange(MOST) // BATCH != 3).astype("float32"),
    "negative": lambda rng: rng.uniform(-1, 2, MOST).astype("float32"),
    "of words": lambda rng: rng.uniform(0.2, 2, (MOST, WORDS)).astype("float32"),
    "of outputs": lambda rng: {
        "one": rng.uniform(0.2, 2, MOST).astype("float32"),
        "other": rng.uniform(0.2, 2, MOST).astype("float32"),
    },
}


def arrays(kind: str, examples: int = MOST) -> Any:
    """Return the first examples of a kind; None for ""."""
    if not kind:
        return None
    # A seed of its own: cases may come and go.
    made = KINDS[kind](np.random.default_rng(zlib.crc32(kind.encode())))
    return keras.tree.map_structure(lambda array: array[:examples], made)


def _batches(data: tuple, size: int, times: int = 1) -> Iterator[tuple]:
    count = len(keras.tree.flatten(data)[0])
    for _ in range(times):
        for begin in range(0, count, size):
            yield keras.tree.map_structure(lambda a, i=begin: a[i : i + size], data)


class _Batches(keras.utils.PyDataset):
    def __init__(self, data: tuple, size: int) -> None:
        super().__init__()
        self._all = list(_batches(data, size))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> tuple:
        return self._all[number]


def _in_parts(data: tuple, size: int) -> Any:
    """Batches of other lengths, as bucket_by_sequence_length makes them."""
    every = tf.data.Dataset.from_tensor_slices(data)
    parts = [every.take(5), every.skip(5).take(8), every.skip(13).take(7), every.skip(20)]
    whole = parts[0].batch(size)
    for part in parts[1:]:
        whole = whole.concatenate(part.batch(size))
    return whole


def _frame(array: np.ndarray) -> Any:
    columns = [f"c{i}" for i in range(array.shape[1])] if array.ndim > 1 else ["c"]
    return pd.DataFrame(array, columns=columns)


def _rows(data: tuple) -> Any:
    return tf.data.Dataset.from_tensor_slices(data)


SOURCES: Mapping[str, Callable[[tuple, int], Any]] = {
    "Dataset": lambda data, size: _rows(data).batch(size),
    "Dataset of full batches": lambda data, size: _rows(data).batch(size, drop_remainder=True),
    "Dataset, shuffled": lambda data, size: _rows(data).shuffle(9, seed=1).batch(size),
    "Dataset of unknown length": lambda data, size: _rows(data).filter(lambda *_: True).batch(size),
    "Dataset of batches of other lengths": _in_parts,
    "generator": lambda data, size: _batches(data, size, 2),
    "PyDataset": _Batches,
}
"""How the batches come, beside "arrays" and "frames"."""


def arguments(case: Case) -> tuple[tuple, dict[str, Any]]:
    """Return x, y and sample_weight, or one source of them, as fit takes them, and the steps where it must know."""
    data = tuple(arrays(kind, case.examples) for kind in (case.x, case.y, case.weights))
    if case.source == "arrays":
        return data, {}
    if case.source == "frames":
        return tuple(a if a is None else _frame(a) for a in data), {}
    given = tuple(a for a in data if a is not None)
    steps = (
        {"steps_per_epoch": -(-case.examples // case.batch)} if case.source == "generator" else {}
    )
    return (SOURCES[case.source](given, case.batch), None, None), steps
