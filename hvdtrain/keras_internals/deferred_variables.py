"""Keras variables with deferred values, so that a model divided over ranks need not fit on any one of them.

A Keras variable with an `_initializer` and no `_value` is deferred. (Keras creates such variables in a
StatelessScope, where, however, neither optimizers nor weights with given values can be created.) Tested with Keras
3.15.
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
from hvdtrain.keras_internals.variables import exchange_value

MIN_DEFERRED_ELEMENTS = 1024
"""Size below which variables get their values at once: they cost little, and some (seeds) belong to no model."""


@contextmanager
def deferred_variables_of(least: int = MIN_DEFERRED_ELEMENTS) -> Iterator[list[Any]]:
    """Create Keras variables without values in this block; yield the list of these variables.

    Their shapes, dtypes, names and initializers are as usual, so that `initialize` gives a variable the value that it
    would have had, and `keep_part` reduces it to a part. A variable that is assigned in the block gets that value; one
    that is read there, as by an optimizer that is built, gets its initial value. The caller must handle all variables
    in the list before the model is used.

    Args:
        least: Variables with fewer elements get their values at once.
    """
    variable_class = backend.Variable
    initialize_now = variable_class._initialize_with_initializer
    initialize_deferred = variable_class._deferred_initialize
    assign_directly = variable_class._direct_assign
    plain_value = variable_class.value
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
        if not is_deferred(self):
            assign_directly(self, value)
            return
        with tf.init_scope():
            self._initialize(tf.cast(value, self._dtype))
        self._initializer = None

    def value(self: Any) -> Any:
        if is_deferred(self) and not backend.in_stateless_scope():
            with tf.init_scope():
                initialize_now(self, self._initializer)
            self._initializer = None
        return plain_value.fget(self)

    variable_class.value = property(value)
    variable_class._initialize_with_initializer = _initialize_with_initializer
    variable_class._deferred_initialize = _deferred_initialize
    variable_class._direct_assign = _direct_assign
    try:
        yield waiting
    finally:
        variable_class.value = plain_value
        variable_class._initialize_with_initializer = initialize_now
        variable_class._deferred_initialize = initialize_deferred
        variable_class._direct_assign = assign_directly


def is_deferred(variable: Any) -> bool:
    """Whether `variable` is a Keras variable that has no value yet."""
    return isinstance(variable, keras.Variable) and variable._value is None


def initialize(variable: Any) -> None:
    """Give a variable without a value its initial value; leave others unchanged."""
    # Variables of a StatelessScope are initialized by Keras when the scope ends.
    if is_deferred(variable) and not backend.in_stateless_scope():
        variable._deferred_initialize()


def keep_part(variable: Any, shard: Shard) -> None:
    """Reduce a Keras variable to `shard` of its value, or of its deferred initial value, and mark it.

    The variable remains the same object, with its path, regularizer and constraint. If it is deferred, it remains so.
    The whole value is in memory temporarily.
    """
    whole = tuple(variable._shape)
    if is_deferred(variable):
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
            exchange_value(variable, value)
    mark_shard(variable, shard)


def release(variable: Any) -> None:
    """Drop the value of a Keras variable to free its memory; its shape and name stay, and its initial value is 0."""
    variable._initializer, variable._value = keras.initializers.Zeros(), None


def rename(variable: Any, path: str) -> None:
    """Set the path of a Keras variable, from which an optimizer derives the names of its state."""
    variable._path = path
