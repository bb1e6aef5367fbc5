"""Loss scaling in steps that are weighted by shares skips the steps that one process skips: two ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("horovod.tensorflow")

from thread_ranks import run_ranks, thread_ranks

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.compression import Compression
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.keras.optimizer import distribute
from hvdtrain.parallel.zero.sharded_optimizer import shard

OF_RANKS = np.array(
    [
        # 80000 is beyond float16; none of its parts is.
        [[3e4, 1.0], [4e4, 1.0], [2.0, 2.0], [np.inf, 1.0], [1.0, 6e4], [3.0, 3.0]],
        [[3e4, 1.0], [4e4, 1.0], [3.0, 5.0], [1.0, 1.0], [1.0, -6e4], [np.nan, 3.0]],
    ],
    np.float32,
)
"""(ranks, steps, 2): the gradients of each rank's part, weighted in the loss."""


def scaled(**kwargs: Any) -> Any:
    optimizer = keras.optimizers.SGD(1e-4, **kwargs)
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=2)


def states(optimizer: Any, steps: np.ndarray, step: Callable[[Any], Step | None]) -> list[Any]:
    """Apply gradients of (steps, 2); return the scale, the optimizer's counters and the weights after each."""
    weights = keras.Variable(np.ones(2, np.float32))
    optimizer.build([weights])
    found = []
    with in_step(step(weights)):
        for gradient in steps:
            optimizer.apply([tf.constant(gradient)], [weights])
            counters = [optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations]
            found.append([*(float(v.numpy()) for v in counters), *weights.numpy().tolist()])
    return found


def weighted(weights: Any) -> Step:
    half = frozenset([id(weights.value)])
    return Step(tf.constant(0.5), lambda total: total, share_in_loss=True, half=half)


@pytest.mark.parametrize(
    "wrap, kwargs",
    [
        (distribute, {}),
        (distribute, {"gradient_accumulation_steps": 2}),
        (shard, {}),
        (shard, {"gradient_accumulation_steps": 2}),
    ],
    ids=["plain", "accumulated", "sharded", "sharded and accumulated"],
)
def test_ranks_skip_what_one_process_skips(wrap: Callable[..., Any], kwargs: Any) -> None:
    def work(ranks: Communicator) -> Any:
        optimizer = wrap(scaled(**kwargs), Reduction(process_set=ranks, weighted=True))
        return states(optimizer, OF_RANKS[ranks.rank()], weighted)

    whole = OF_RANKS.sum(axis=0).astype(np.float16).astype(np.float32)
    wanted = states(scaled(**kwargs), whole, lambda _: None)
    assert [row[0] for row in wanted] == [8, 4, 4, 2, 2, 1]
    for found in run_ranks(thread_ranks(2), work):
        if isinstance(found, Exception):
            raise found
        assert found == wanted


def test_a_local_gradient_that_is_not_finite_is_skipped_by_all() -> None:
    """With global_clipnorm, which the ranks compute together, one that skipped alone would leave the others waiting."""

    def work(ranks: Communicator) -> list[list[float]]:
        optimizer = distribute(scaled(global_clipnorm=1.0), Reduction(process_set=ranks))
        shared, local = keras.Variable(np.ones(2, np.float32)), keras.Variable([1.0])
        optimizer.build([shared, local])
        optimizer.inner_optimizer.register_local_var(local)
        found = []
        with in_step(weighted(shared)):
            for number in (1.0, np.inf, 2.0):
                own = number if ranks.rank() == 0 else 1.0
                optimizer.apply([tf.ones(2), tf.constant([own])], [shared, local])
                found.append([float(optimizer.iterations.numpy()), *shared.numpy().tolist()])
        return found

    first, second = run_ranks(thread_ranks(2), work)
    assert first == second
    assert first[0][1:] == first[1][1:] != first[2][1:]


def test_gradients_are_sent_scaled() -> None:
    """As Horovod does on tf-keras: float16 has nothing between 0 and 6e-8, where unscaled gradients often are."""
    gradients = np.array([[1e-8, 3e-8], [3e-8, 5e-8]], np.float32)
    scale = 2.0**15

    def work(ranks: Communicator) -> list[float]:
        reduction = Reduction(process_set=ranks, compression=Compression.fp16)
        plain = keras.optimizers.SGD(1.0)
        optimizer = distribute(keras.optimizers.LossScaleOptimizer(plain, scale), reduction)
        weights = keras.Variable(np.zeros(2, np.float32))
        optimizer.apply([tf.constant(scale * gradients[ranks.rank()])], [weights])
        return weights.numpy().tolist()

    for found in run_ranks(thread_ranks(2), work):
        # Half the distance between neighbouring float16 numbers, once for each rank and once for their sum.
        np.testing.assert_allclose(found, -gradients.mean(axis=0), rtol=3 * 2.0**-11)
