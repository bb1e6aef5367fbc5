"""State of layers that is not a variable's value, or not equal on all ranks. One rank: nothing is launched."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from thread_ranks import thread_ranks

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.mesh import Mesh, position_in
from hvdtrain.keras import callbacks
from hvdtrain.strategies.training_state import broadcast_state

X = np.array([[10.0], [14.0]], "float32")


def by_callback(model: keras.Model) -> None:
    options: dict[str, Any] = {"epochs": 1, "steps_per_epoch": 0, "verbose": 0}
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    broadcast.set_model(model)
    broadcast.set_params(options)
    broadcast.on_train_begin()


def by_elastic_state(model: keras.Model) -> None:
    hvd.elastic.KerasState(model).sync()


def by_trainer(model: keras.Model) -> None:
    (ranks,) = thread_ranks(1)
    broadcast_state(model, position_in(Mesh(), ranks, ranks.subset))


@pytest.mark.parametrize("broadcast", [by_callback, by_elastic_state, by_trainer])
def test_normalization_computes_its_constants_again(broadcast: Any) -> None:
    """Only rank 0 has adapted the layer, or read a file: the others get its variables."""
    hvdtrain.init()
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    layer.adapt_mean.assign([12.0])
    layer.adapt_variance.assign([4.0])
    np.testing.assert_allclose(layer(X), X)
    broadcast(model)
    np.testing.assert_allclose(layer(X), [[-1.0], [1.0]])


def test_statistics_are_averaged_before_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the epoch ends within an execution: of 6 steps, 4 and 2."""
    hvdtrain.init()
    order: list[str] = []
    monkeypatch.setattr(callbacks, "average_statistics", lambda *_: order.append("averaged"))
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse", steps_per_execution=4, jit_compile=False)
    validates = keras.callbacks.LambdaCallback()
    validates.on_test_begin = lambda logs=None: order.append("validates")
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), validates]
    x = np.ones([6, 1], "float32")
    model.fit(x, x, 1, 2, 0, own, validation_data=(x, x))
    assert order == ["averaged", "validates"] * 2
