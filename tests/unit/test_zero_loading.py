"""What one rank loads into a sharded optimizer reaches the others: two ranks in threads."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import run_ranks, thread_ranks

from hvdtrain.errors import UsageError
from hvdtrain.keras.elastic import KerasState
from hvdtrain.keras_internals.optimizer_state import broadcast_loaded_state
from hvdtrain.parallel import ShardedOptimizer


def both(make: Any, dtype: str = "float32") -> list[Any]:
    optimizers = [ShardedOptimizer(make(), process_set=ranks) for ranks in thread_ranks(2)]
    for optimizer in optimizers:
        optimizer.build([keras.Variable(np.ones((3, 3)), dtype=dtype, name="kernel")])
    return optimizers


def store_of(plain: Any, dtype: str = "float32") -> dict[str, np.ndarray]:
    plain.build([keras.Variable(np.ones((3, 3)), dtype=dtype, name="kernel")])
    plain.apply([tf.reshape(tf.range(9, dtype=dtype), (3, 3))])
    return {str(i): v.numpy() for i, v in enumerate(plain.variables)}


def share(optimizers: list[Any]) -> None:
    job = [getattr(o, "inner_optimizer", o).process_set for o in optimizers]
    found = run_ranks(job, lambda ranks: broadcast_loaded_state(optimizers[ranks.rank()]))
    assert found == [None, None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_rank_0_loads_for_all(dtype: str, scaled: bool) -> None:
    def make() -> Any:
        adam = keras.optimizers.Adam(1e-2)
        return keras.optimizers.LossScaleOptimizer(adam) if scaled else adam

    store = store_of(make(), dtype)
    first, second = both(make, dtype)
    first.load_own_variables(store)
    share([first, second])
    inner = [getattr(o, "inner_optimizer", o) for o in (first, second)]
    wanted = list(store.values())[-len(inner[0].variables) :]
    for place, whole in enumerate(wanted):
        parts = [np.asarray(o.variables[place].numpy(), "float64") for o in inner]
        if whole.ndim:
            assert [len(part) for part in parts] == [5, 4]
            parts = [np.concatenate(parts)]
        for part in parts:
            assert np.ravel(part).tolist() == np.ravel(np.asarray(whole, "float64")).tolist()
    assert np.abs(np.asarray(wanted[-1], "float64")).max() > 0
    assert [o.hvdtrain_loaded for o in inner] == [None, None]


def test_nothing_loaded_changes_nothing() -> None:
    first, second = both(keras.optimizers.Adam)
    second.variables[2].assign(np.full(4, 7.0))
    share([first, second])
    assert second.variables[2].numpy().tolist() == [7.0] * 4


def test_elastic_refuses_it() -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    optimizer = ShardedOptimizer(keras.optimizers.Adam(), process_set=thread_ranks(2)[0])
    model.compile(optimizer, "mse")
    with pytest.raises(
        UsageError, match="sharded optimizer cannot continue with a different number"
    ):
        KerasState(model)
