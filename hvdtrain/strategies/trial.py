"""Trials: a model's step on a few examples, whole and in parts, of which nothing remains."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.step_context import Step
from hvdtrain.keras_internals.compiled_losses import outputs_read_as_rows
from hvdtrain.keras_internals.metric_calls import metrics_of
from hvdtrain.keras_internals.models import numbers_kept, trains_by_keras
from hvdtrain.keras_internals.variables import (
    global_seed_variable,
    untracked_variables,
    values_kept,
)
from hvdtrain.strategies import batch_dependence

TOLERANCES = {"float16": 3e-2, "bfloat16": 2e-1}
"""Relative tolerance by compute dtype (11 and 8 significant bits, about ten roundings deep); 1e-3 for others. A wrong
rule is off by about the ratio of the parts' sizes, 0.2 or more."""

Result = TypeVar("Result")


def tolerance(model: keras.Model) -> float:
    """Return the relative tolerance for results of a model; see TOLERANCES."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return max(TOLERANCES.get(dtype, 1e-3) for dtype in dtypes)


def in_parts(model: keras.Model, data: Any) -> tuple[list[Any], list[float]]:
    """Return two uneven parts of `data`, and their shares."""
    size = int(tf.nest.flatten(data)[0].shape[0])
    cut = _cut(size, outputs_read_as_rows(model, data))
    return [rows_of(data, 0, cut), rows_of(data, cut, size)], [cut / size, (size - cut) / size]


def _cut(size: int, outputs: int) -> int:
    """Return the number of examples in the first of two uneven parts, none of which has `outputs` examples."""
    cuts = range(size // 2 + 1, size)
    return next((cut for cut in cuts if outputs not in (cut, size - cut)), size // 2 + size % 2)


def _count(counted: list[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    def total(divisor: tf.Tensor) -> tf.Tensor:
        counted.append(divisor)
        return divisor

    return total


def _tell(totals: Iterator[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda divisor: next(totals)


def rows_of(data: Any, begin: int, end: int) -> Any:
    """Return rows begin..end of the tensors in `data`."""
    return tf.nest.map_structure(lambda leaf: leaf[begin:end], data)


def varied(data: Any) -> Any:
    """Return `data` with other labels and padding in some examples; None if it holds no integers.

    In a few examples a rare label, or padding, may be missing, and a weight that is counted in the batch looks like a
    constant. The last half of the numbers of an example become 0, and 1 where they were 0. Floats without
    fractions are integers, too. A single row stays as it is.
    """
    leaves = tf.nest.flatten(data)
    found = [_other_integers(leaf) for leaf in leaves]
    if all(one is other for one, other in zip(found, leaves, strict=True)):
        return None
    return tf.nest.pack_sequence_as(data, found)


def _other_integers(leaf: Any) -> Any:
    values = np.array(leaf)
    has_rows = values.ndim > 0 and len(values) > 1 and values.size > 0
    if not has_rows or values.dtype.kind not in "biuf" or (values != np.floor(values)).any():
        return leaf
    rows = values.reshape(len(values), -1)
    # Another number of them in each of two parts.
    some = [0, 1, -1] if len(rows) > 4 else slice(len(rows) // 2)
    second_half = slice(rows.shape[1] // 2, None)
    rows[some, second_half] = rows[some, second_half] == 0
    return tf.convert_to_tensor(values)


def of_parts(
    run: Callable[[Any, Step], Result], parts: Sequence[Any], shares: Sequence[float], step: Step
) -> list[Result]:
    """Return the result of `run` for each part, as on a rank with this share of the whole."""
    counted: list[list[tf.Tensor]] = [[] for _ in parts]
    steps = [replace(step, share=tf.constant(share, tf.float32)) for share in shares]
    found = [
        run(part, replace(own, total=_count(divisors)))
        for part, own, divisors in zip(parts, steps, counted, strict=True)
    ]
    totals = [tf.add_n(each) for each in zip(*counted, strict=True)]
    if totals:  # The divisors of the losses are known only now.
        found = [
            run(part, replace(own, total=_tell(iter(totals))))
            for part, own in zip(parts, steps, strict=True)
        ]
    return found


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """When the block ends, restore all variables that a step may change without an optimizer."""
    # Including those of metrics that the model does not list.
    counted = [v for metric in metrics_of(model) for v in metric.variables]
    kept = [*model.non_trainable_variables, *model.metrics_variables, *counted]
    kept += untracked_variables(model)
    # The next draw must be the same as without a trial: a resumed run has its generator before it.
    if (seed := global_seed_variable(create=False)) is not None:
        kept.append(seed)
    if not trains_by_keras(model):
        kept += model.trainable_variables
    with values_kept(kept), numbers_kept(model):
        yield


@contextlib.contextmanager
def repeatable(model: keras.Model) -> Iterator[None]:
    """Inside the block, let Keras layers draw nothing at random and normalize by their moving statistics."""
    changed = [layer for layer in model._flatten_layers() if _differs_by_nature(layer)]
    for layer in changed:
        object.__setattr__(layer, "call", functools.partial(_in_inference, layer))
    eagerly = tf.config.functions_run_eagerly()
    precision = tf.config.experimental
    # GPUs multiply float32 in TensorFloat-32 by default, with the significant bits of float16, and not alike for
    # batches of different sizes: the gradients of deep networks then differ by a tenth.
    tf32 = precision.tensor_float_32_execution_enabled()
    # A step may call tf.functions of its own, in which gradients would have no values yet.
    tf.config.run_functions_eagerly(True)
    precision.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        precision.enable_tensor_float_32_execution(tf32)
        tf.config.run_functions_eagerly(eagerly)
        for layer in changed:
            object.__delattr__(layer, "call")


def _in_inference(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).call(layer, *args, **kwargs | {"training": False})


def _differs_by_nature(layer: Any) -> bool:
    knows_training = getattr(layer, "_call_has_training_arg", False)
    return knows_training and (
        batch_dependence.normalizes(layer) or batch_dependence.has_generator(layer)
    )


def in_one_line(error: Exception) -> str:
    """Return an error's class and the first line of its message; within Keras's layers, of the original one."""
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
