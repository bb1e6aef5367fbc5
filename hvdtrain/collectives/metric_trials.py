"""Trials of a metric, with generated arguments of the shapes and dtypes that a step passes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.metric_merging import Trial, Updates

PARTS = ((2, 3, 3), (4, 1, 3), (0, 1, 2))
"""Examples of three workers in each of three steps: uneven, changing, and the first worker idle in the last step.

The last worker is never idle, as in training.
"""
EVEN_PARTS = ((2, 2), (3, 3), (1, 1))
"""Examples of two replicas of one process in each step."""
WHOLE_PARTS = ((5, 0), (0, 4), (3, 0))
"""Examples of two workers that take whole batches in turns."""


def make_trials(
    calls: Updates,
    examples: int,
    scalars_add_up: bool,
    parts: Sequence[Sequence[int]] = PARTS,
) -> list[Trial]:
    """Return two trials of a metric that a step on `examples` examples updated with `calls`.

    The first has random numbers between 0 and 1, and integers 0 and 1. In the second, for metrics that look for
    labels or padding, first arguments hold only 0 and 1 (integers: only 1).

    Args:
        calls: Arguments of the updates. Of tensors, symbolic ones too, only shape and dtype matter; anything else is
            passed unchanged.
        examples: Number of examples in the step; a leading dimension of that size is the batch dimension.
        scalars_add_up: Whether a scalar for the whole batch is a sum over its examples, not a mean.
        parts: Number of examples of each worker in each step.
    """
    return [
        _trial(calls, examples, scalars_add_up, parts, _Numbers(seed, labels=labels))
        for seed, labels in enumerate((False, True))
    ]


def has_scalars(calls: Updates) -> bool:
    """Whether the first argument of a call is a floating-point scalar for the whole batch."""
    return any(len(args) > 0 and _is_scalar(args[0]) for args, _ in calls)


@dataclass(frozen=True)
class _Split:
    """One argument in one step: for the whole batch, and for the part of each worker."""

    whole: Any
    parts: Sequence[Any]


def _trial(
    calls: Updates,
    examples: int,
    scalars_add_up: bool,
    sizes_of_steps: Sequence[Sequence[int]],
    numbers: _Numbers,
) -> Trial:
    workers = range(len(sizes_of_steps[0]))
    whole: list[Updates] = []
    parts: list[list[Updates]] = [[] for _ in workers]
    for sizes in sizes_of_steps:
        made = [_split(call, examples, sizes, scalars_add_up, numbers) for call in calls]
        whole.append(keras.tree.map_structure(lambda split: split.whole, made))
        for worker, size in enumerate(sizes):
            updates = keras.tree.map_structure(lambda split, i=worker: split.parts[i], made)
            parts[worker].append(updates if size else [])
    shares = [[sizes[worker] / sum(sizes) for sizes in sizes_of_steps] for worker in workers]
    return Trial(whole, parts, shares)


def _split(
    call: Any, examples: int, sizes: Sequence[int], scalars_add_up: bool, numbers: _Numbers
) -> tuple[Any, Any]:
    args, kwargs = call

    def make(first: bool) -> Callable[[Any], _Split]:
        return lambda leaf: _made(
            leaf, examples, sizes, first and not scalars_add_up, first, numbers
        )

    split_args = [keras.tree.map_structure(make(i == 0), arg) for i, arg in enumerate(args)]
    named = {k: keras.tree.map_structure(make(False), v) for k, v in kwargs.items()}
    return split_args, named


def _made(
    leaf: Any, examples: int, sizes: Sequence[int], is_mean: bool, is_first: bool, numbers: _Numbers
) -> _Split:
    n = sum(sizes)
    if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == examples:
        return _Split(n, list(sizes))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return _Split(leaf, [leaf] * len(sizes))
    dtype = tf.as_dtype(leaf.dtype)
    shape = [8 if d is None else int(d) for d in leaf.shape]
    if shape and (leaf.shape[0] is None or (shape[0] and shape[0] % max(examples, 1) == 0)):
        rows = 1 if leaf.shape[0] is None else shape[0] // examples
        array = numbers.array((n * rows, *shape[1:]), dtype, is_first)
        ends = np.cumsum(sizes) * rows
        pieces = np.split(array, ends[:-1])
        return _Split(tf.constant(array, dtype), [tf.constant(p, dtype) for p in pieces])
    if dtype.is_floating and (shape or is_first):
        values = [numbers.array(shape, dtype, False) for _ in sizes]
        factors = [size / n if is_mean else float(size > 0) for size in sizes]
        total = sum(f * v for f, v in zip(factors, values, strict=True))
        return _Split(tf.constant(total, dtype), [tf.constant(v, dtype) for v in values])
    if not shape:
        return _Split(tf.constant(n, dtype), [tf.constant(size, dtype) for size in sizes])
    array = tf.constant(numbers.array(shape, dtype, False), dtype)
    return _Split(array, [array] * len(sizes))


class _Numbers:
    def __init__(self, seed: int, labels: bool) -> None:
        self._random = np.random.default_rng(seed)
        self._labels = labels

    def array(self, shape: Sequence[int], dtype: tf.DType, is_first: bool) -> np.ndarray:
        if not dtype.is_floating:
            # All 1, so that the minimum and maximum of labels are the same in all parts.
            return (
                np.ones(shape) if self._labels and is_first else self._random.integers(0, 2, shape)
            )
        if self._labels and is_first:
            return self._random.integers(0, 2, shape).astype(np.float64)
        return self._random.uniform(0.1, 0.9, shape)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and tf.as_dtype(value.dtype).is_floating
