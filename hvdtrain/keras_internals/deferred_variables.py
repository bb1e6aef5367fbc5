"""Keras variables without values: a model whose parts are on several ranks is built on none of them whole.

What this knows of Keras's inside: a Variable that has an `_initializer` and no `_value` is one that waits
(Keras makes them in its StatelessScope, where, however, neither optimizers nor weights with given
values can be made). Tested with Keras 3.15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from hvdtrain.keras_internals.shards import Shard, mark_shard

LEAST_ELEMENTS = 1024
"""Smaller variables get their values at once: they cost nothing, and some (random seeds) belong to no model."""


@contextmanager
def waiting_variables(least: int = LEAST_ELEMENTS) -> Iterator[list[Any]]:
    """Give the Keras variables that are made in this block no memory; yield the list of them.

    Shapes, dtypes, names and initializers are as ever, so `initialize` gives each the value that it would have
    got, and `keep_part` a part of it. A variable that is assigned to in the block gets that value.
    Whoever opens the block must treat all of the list in one of these ways before the model is used.

    Args:
        least: variables with fewer elements do not wait.
    """
    variable_class = backend.Variable
    initialize_now = variable_class._initialize_with_initializer
    initialize_deferred = variable_class._deferred_initialize
    assign_directly = variable_class._direct_assign
    waiting: list[Any] = []

    def waits(variable: Any) -> bool:
        return math.prod(variable._shape) >= least

    def _initialize_with_initializer(self: Any, initializer: Any) -> None:
        if not waits(self):
            initialize_now(self, initializer)
            return
        self._value, self._initializer = None, initializer
        waiting.append(self)

    def _deferred_initialize(self: Any) -> None:
        if waits(self):
            waiting.append(self)
        else:
            initialize_deferred(self)

    def _direct_assign(self: Any, value: Any) -> None:
        if not is_waiting(self):
            assign_directly(self, value)
            return
        with tf.init_scope():
            self._initialize(tf.cast(value, self._dtype))
        self._initializer = None

    variable_class._initialize_with_initializer = _initialize_with_initializer
    variable_class._deferred_initialize = _deferred_initialize
    variable_class._direct_assign = _direct_assign
    try:
        yield waiting
    finally:
        variable_class._initialize_with_initializer = initialize_now
        variable_class._deferred_initialize = initialize_deferred
        variable_class._direct_assign = assign_directly


def is_waiting(variable: Any) -> bool:
    """Whether the Keras variable has no value yet; a tf.Variable always has one."""
    return isinstance(variable, keras.Variable) and variable._value is None


def initialize(variable: Any) -> None:
    """Give a waiting variable its value; others stay as they are."""
    # What is made in a StatelessScope, Keras itself initializes where that ends.
    if is_waiting(variable) and not backend.in_stateless_scope():
        variable._deferred_initialize()


def keep_part(variable: Any, shard: Shard) -> None:
    """Make the Keras variable hold only `shard` of what it holds, or of what it waits for, and mark it.

    The variable stays the same object: its path, regularizer, constraint and place in its layer stay. One that
    waits continues to wait. The whole value is in memory for a moment.
    """
    whole = tuple(variable._shape)
    if is_waiting(variable):
        initializer = variable._initializer

        def part_of_initial_value(shape: Any, dtype: Any = None) -> Any:
            del shape
            return shard.part_of(initializer(whole, dtype=dtype))

        variable._initializer = part_of_initial_value
        variable._shape = shard.part_shape(whole)
    else:
        value = shard.part_of(variable._value.read_value())
        variable._shape = shard.part_shape(whole)
        with tf.init_scope():
            variable._initialize(value)
    mark_shard(variable, shard)
