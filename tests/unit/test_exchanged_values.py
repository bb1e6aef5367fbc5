"""Keras variables whose tf.Variable is exchanged: their optimizer knows them as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from thread_ranks import thread_ranks

from hvdtrain.keras_internals.optimizers import optimizer_slots
from hvdtrain.keras_internals.remote_variables import (
    kept_variables,
    replace_value,
    split_value,
    update_where_variables_are,
)
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.parallel.layer_placement import place
from hvdtrain.parallel.tensor.convert import convert


def built() -> keras.Model:
    """With a kernel that does not decay, given as an object."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(4, name="down")])
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
    model.optimizer.exclude_from_weight_decay(var_list=[model.get_layer("down").kernel])
    return model


def with_slots(model: keras.Model) -> list[Any]:
    model.optimizer.build(model.trainable_variables)
    return [(v, [v, *slots]) for v, slots in optimizer_slots(model.optimizer)]


def as_it_is(model: keras.Model) -> None:
    with_slots(model)


def over_ranks(model: keras.Model) -> None:
    with_slots(model)
    convert(model, {"down": "row"}, SimpleNamespace(tensor_set=thread_ranks(2)[1]))


def on_another_device(model: keras.Model) -> None:
    place(model, {"down": "CPU:0"})


def in_a_job_that_is_joined(model: keras.Model) -> None:
    with_slots(model)
    with kept_variables():
        pass


def on_a_server(model: keras.Model) -> None:
    for _, held in with_slots(model):
        for one in held:
            replace_value(one, tf.Variable(one.value))
    update_where_variables_are(model.optimizer)


def over_servers(model: keras.Model) -> None:
    for _, held in with_slots(model):
        for one in held:
            parts = [tf.Variable(part) for part in tf.split(one.value, 2)]
            split_value(one, parts, tf.Variable(0.0))
    update_where_variables_are(model.optimizer)


def after_a_step(model: keras.Model) -> list[tuple[Any, np.ndarray]]:
    variables = model.trainable_variables
    gradients = [tf.fill(v.shape, 0.5) for v in variables]
    tf.function(lambda: model.optimizer.apply(gradients, variables))()
    return [(v, v.numpy()) for v in variables]


@pytest.mark.parametrize(
    "exchange",
    [over_ranks, on_another_device, in_a_job_that_is_joined, on_a_server, over_servers],
)
def test_a_step_and_what_does_not_decay_are_those_of_plain_keras(exchange: Any) -> None:
    plain, model = built(), built()
    as_it_is(plain)
    exchange(model)
    for (mine, value), (_, whole) in zip(after_a_step(model), after_a_step(plain), strict=True):
        shard = shard_of(mine)
        expected = whole if shard is None else shard.part_of(whole)
        np.testing.assert_allclose(value, expected, atol=1e-6)
