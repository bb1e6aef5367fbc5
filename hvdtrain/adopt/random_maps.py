"""Makes tf.data pipelines of a script that draw random numbers yield the same on all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from hvdtrain.adopt.notes import Tell
from hvdtrain.data.tf_data_graph import DRAWING, operations_of

PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
"""TensorFlow operations that call Python (tf.py_function, tf.numpy_function), which may draw as well."""


@contextlib.contextmanager
def random_maps_in_order(tell: Tell) -> Iterator[None]:
    """In this block, let Dataset.map call a function that draws random numbers for one element after the other.

    In several threads at once (num_parallel_calls), each run and each rank would draw other numbers for an element.
    All ranks have the same seeds.

    Args:
        tell: Told of each such map.
    """
    parallel: Callable[..., Any] = tf.data.Dataset.map

    @functools.wraps(parallel)
    def in_order(
        self: Any, map_func: Any, num_parallel_calls: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        found = parallel(self, map_func, num_parallel_calls, *args, **kwargs)
        if num_parallel_calls is None or not _draws(found):
            return found
        tell(
            "map",
            "its function may draw random numbers: one element after the other, not several at once",
        )
        return parallel(self, map_func)

    with mock.patch.object(tf.data.Dataset, "map", in_order):
        yield


def _draws(dataset: Any) -> bool:
    return any(node.op in DRAWING | PYTHON for node in operations_of(dataset))
