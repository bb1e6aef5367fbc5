"""Calls of a script, beside its training, that a rank makes otherwise than one process does.

Generators without a seed get the same one on all ranks; a tf.data pipeline that draws random numbers yields the same on
all; rank 0 downloads a file before the others look for it, and reads what the user types; settings are left out that
TensorFlow takes only before it starts, as it has started when an adopted script begins; and workers take the place of a
MirroredStrategy's replicas.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.adopt.notes import Tell
from hvdtrain.adopt.same_way import SameWay
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.first_rank import first_rank_first
from hvdtrain.data.tf_data_graph import COUNTING, operations_of
from hvdtrain.keras_internals.corrections import replaced

_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
"""TensorFlow operations that call Python (tf.py_function, tf.numpy_function), which may draw as well."""
_SETTERS = (
    (tf.config, "set_visible_devices"),
    (tf.config, "set_logical_device_configuration"),
    (tf.config.experimental, "set_visible_devices"),
    (tf.config.experimental, "set_memory_growth"),
    (tf.config.experimental, "set_virtual_device_configuration"),
    (tf.config.threading, "set_inter_op_parallelism_threads"),
    (tf.config.threading, "set_intra_op_parallelism_threads"),
)


@contextlib.contextmanager
def same_seeds(seed: int, tell: Tell) -> Iterator[None]:
    """In this block, seed what would otherwise be seeded by the operating system, on each rank differently.

    These are `np.random.default_rng()`, `np.random.seed()` and `random.seed()` without an argument.

    Args:
        seed: The same on all ranks; each call without a seed gets another one that follows from it.
        tell: Told of each call.
    """
    numbers = itertools.count(seed)

    def seeded(function: Callable[..., Any], seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        if seed is None:
            seed = next(numbers)
            tell(f"{function.__name__} without a seed", "all workers are given the same seed")
        return function(seed, *args, **kwargs)

    with (
        replaced(np.random, "default_rng", seeded),
        replaced(np.random, "seed", seeded),
        replaced(random, "seed", seeded),
    ):
        yield


@contextlib.contextmanager
def random_maps_in_order(tell: Tell) -> Iterator[None]:
    """In this block, let Dataset.map call a function that draws random numbers for one element after the other.

    In several threads at once (num_parallel_calls), each run and each rank would draw other numbers for an element.
    All ranks have the same seeds.

    Args:
        tell: Told of each such map.
    """

    def in_order(
        parallel: Callable[..., Any], dataset: Any, map_func: Any,
        num_parallel_calls: Any = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        found = parallel(dataset, map_func, num_parallel_calls, *args, **kwargs)
        if num_parallel_calls is None or not _draws(found):
            return found
        tell(
            "map",
            "its function may draw random numbers: one element after the other, not several at once",
        )
        return parallel(dataset, map_func)

    with replaced(tf.data.Dataset, "map", in_order):
        yield


@contextlib.contextmanager
def late_settings_left_out(tell: Tell) -> Iterator[None]:
    """In this block, leave out settings that come too late: which devices and threads a worker has, the launcher says.

    Args:
        tell: Told of each that is left out.
    """

    def lenient(setter: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            setter(*args, **kwargs)
        except RuntimeError as error:
            if "cannot be modified after" not in str(error):
                raise
            tell(
                setter.__name__, "left out: the launcher gives each worker its devices and threads"
            )

    with contextlib.ExitStack() as blocks:
        for module, name in _SETTERS:
            blocks.enter_context(replaced(module, name, lenient))
        yield


@contextlib.contextmanager
def mirrored_by_workers(tell: Tell) -> Iterator[None]:
    """In this block, a MirroredStrategy is TensorFlow's default strategy, which changes nothing.

    Not in a worker that has several GPUs.

    Args:
        tell: Told of each.
    """
    original = tf.distribute.MirroredStrategy

    class Mirrored(original):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(tf.config.list_logical_devices("GPU")) > 1:
                return original(*args, **kwargs)
            tell("MirroredStrategy", "the workers take the place of its replicas: it has one")
            return tf.distribute.get_strategy()

    with mock.patch.object(tf.distribute, "MirroredStrategy", Mirrored):
        yield


@contextlib.contextmanager
def done_once(tell: Tell, way: SameWay) -> Iterator[None]:
    """In this block, rank 0 downloads a file of `keras.utils.get_file` before the others look for it, and only it reads
    `input()`.

    Args:
        tell: Told of each.
        way: Whether the ranks make the same calls.
    """

    def on_rank_0_first(download: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not way.joins("get_file"):
            return download(*args, **kwargs)
        tell("get_file", "rank 0 downloads the file, before the others look for it")
        found = _of_rank_0(lambda: download(*args, **kwargs))
        return found if ALL_RANKS.rank() == 0 else download(*args, **kwargs)

    def read_by_rank_0(read: Callable[[Any], str], prompt: Any = "", /) -> str:
        if not way.joins("input"):
            return read(prompt)
        tell("input", "rank 0 reads the line for all workers")
        return _of_rank_0(lambda: read(prompt))

    original: object = keras.utils.get_file
    with contextlib.ExitStack() as blocks:
        for module in list(sys.modules.values()):  # Those of keras.datasets hold it under its name.
            if getattr(module, "__dict__", {}).get("get_file") is original:
                blocks.enter_context(replaced(module, "get_file", on_rank_0_first))
        blocks.enter_context(replaced(builtins, "input", read_by_rank_0))
        yield


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


def _draws(dataset: Any) -> bool:
    return any(node.op in COUNTING | _PYTHON for node in operations_of(dataset))
