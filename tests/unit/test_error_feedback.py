"""PowerSGD and top-k against NumPy. The ranks are threads: nothing is launched."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.checkpoint.state import TrainingState, own_variables
from hvdtrain.collectives.communicator import Average, Sum
from hvdtrain.collectives.mesh import Mesh, position_in
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute
from hvdtrain.strategies.horovod import HorovodStrategy

RANKS, STEPS, ROWS, COLUMNS = 3, 4, 64, 48
SHAPES = [(8, 8, COLUMNS), (5,)]
"""The first one is compressed, as a matrix of 64 x 48."""
SHARES = [0.5, 0.5, 0.0]


def gradients(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng([rank, step])
    return [random.normal(size=shape).astype("float32") for shape in SHAPES]


def trained(compression: Any, op: Any, shares: list[float] | None = None) -> list[Any]:
    """Return each rank's variables, from 0 by the negative of the combined gradients, and what it remembers."""
    everyone = thread_ranks(RANKS)
    made = []
    for ranks in everyone:
        reduction = Reduction(process_set=ranks, compression=compression, op=op)
        optimizer = distribute(keras.optimizers.SGD(1.0), reduction)
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        optimizer.build(variables)
        made.append((optimizer, variables))

    def work(ranks: ThreadRanks) -> list[np.ndarray]:
        optimizer, variables = made[ranks.rank()]
        share = None if shares is None else tf.constant(shares[ranks.rank()])
        step_here = None if share is None else Step(share, lambda x: x, share_in_loss=False)
        for step in range(STEPS):
            with in_step(step_here):
                optimizer.apply([tf.constant(g) for g in gradients(ranks.rank(), step)], variables)
        (memory,) = optimizer.hvdtrain_reducer.memories.values()
        return [v.numpy() for v in variables] + [memory.error.numpy()]

    found = run_ranks(everyone, work)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def in_numpy(compression: Any, parts: list[float]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the negative of all updates added up, and the errors. `parts`: by which the ranks' gradients count."""
    total, errors = np.zeros(ROWS * COLUMNS), [np.zeros(ROWS * COLUMNS) for _ in range(RANKS)]
    rank = getattr(compression, "rank", 1)
    right = tf.random.stateless_normal([COLUMNS, rank], seed=[0, rank]).numpy().astype(float)
    for step in range(STEPS):
        whole = [p * gradients(r, step)[0].ravel() * 1.0 + errors[r] for r, p in enumerate(parts)]
        if isinstance(compression, hvd.Compression.power_sgd):
            matrices = [one.reshape(ROWS, COLUMNS) for one in whole]
            left, _ = np.linalg.qr(sum(m @ right for m in matrices))
            own = [m.T @ left for m in matrices]
            right = sum(own)
            sent = [(left @ one.T).ravel() for one in own]
        else:
            sent = []
            for one in whole:
                count = int(np.ceil(compression.fraction * one.size))
                limit = np.sort(abs(one))[-count]
                sent.append(np.where(abs(one) >= limit, one, 0))
        errors = [one - gone for one, gone in zip(whole, sent, strict=True)]
        total -= sum(sent)
    return total, errors


COMPRESSIONS = [hvd.Compression.power_sgd(rank=3), hvd.Compression.top_k(fraction=0.05)]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_as_in_numpy(compression: Any) -> None:
    """As a sum, as a mean, and weighted by the shares of a step in which a rank has no example."""
    for op, shares, parts in (
        (Sum, None, [1.0] * RANKS),
        (Average, SHARES, SHARES),
    ):
        total, errors = in_numpy(compression, parts)
        found = trained(compression, op, shares)
        dense = -sum(p * gradients(r, s)[1] for r, p in enumerate(parts) for s in range(STEPS))
        for mine, error in zip(found, errors, strict=True):
            np.testing.assert_allclose(mine[0].ravel(), total, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(mine[1], dense, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(mine[2], error, rtol=1e-4, atol=1e-4)
            assert np.array_equal(mine[0], found[0][0])


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_what_was_not_sent_is_remembered(compression: Any) -> None:
    """Of a mean: all that was applied and all errors make up the gradients."""
    found = trained(compression, Average)
    sums = sum(gradients(r, s)[0] for r in range(RANKS) for s in range(STEPS)).ravel() / RANKS
    errors = sum(mine[2] for mine in found) / RANKS
    np.testing.assert_allclose(errors - found[0][0].ravel(), sums, atol=1e-4)


@pytest.mark.parametrize("name", ["power_sgd", "top_k"])
def test_a_gradient_of_nan_does_not_stay(name: str) -> None:
    hvdtrain.init()
    variable = keras.Variable(np.zeros((64, 64), "float32"))
    compression = {
        "power_sgd": hvd.Compression.power_sgd(),
        "top_k": hvd.Compression.top_k(0.1),
    }[name]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    optimizer.build([variable])
    (memory,) = optimizer.hvdtrain_reducer.memories.values()
    optimizer.apply([tf.ones([64, 64])], [variable])
    before = [v.numpy() for v in (memory.error, *memory.shared)]
    for place in (0, 64 * 64 - 1):  # top_k need not choose a nan.
        nan = tf.tensor_scatter_nd_update(tf.ones([64 * 64]), [[place]], [float("nan")])
        optimizer.apply([tf.reshape(nan, [64, 64])], [variable])
        after = [v.numpy() for v in (memory.error, *memory.shared)]
        assert all(map(np.array_equal, after, before))


def test_a_checkpoint_has_it_and_a_file_for_plain_keras_has_not() -> None:
    model = keras.Sequential([keras.layers.Input([64]), keras.layers.Dense(64)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=hvd.Compression.top_k()),
        "mse",
    )
    model.optimizer.build(model.trainable_variables)
    (memory,) = model.optimizer.hvdtrain_reducer.memories.values()
    assert any(v is memory.error for v in own_variables(model))
    assert not any(v is memory.error for v in model.optimizer.variables)


@pytest.mark.parametrize(("weighted", "error"), [(True, 3.0), (False, 1.5)])
def test_one_rank_goes_on_from_the_errors_of_two(weighted: bool, error: float) -> None:
    """As a sum where the ranks' gradients were parts of one; as a mean where they were averaged."""

    def made(value: float) -> tuple[keras.Model, TrainingState]:
        (ranks,) = thread_ranks(1)
        strategy = HorovodStrategy()
        strategy.set_position(position_in(Mesh(), ranks, ranks.subset))
        reduction = Reduction(compression=COMPRESSIONS[0], process_set=ranks, weighted=weighted)
        layers = [keras.layers.Input([64]), keras.layers.Dense(64, name="dense")]
        model = keras.Sequential(layers, name="one")
        optimizer = distribute(keras.optimizers.SGD(), reduction)
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        (memory,) = model.optimizer.hvdtrain_reducer.memories.values()
        for variable in (memory.error, *memory.shared):
            variable.assign(tf.fill(variable.shape, value))
        return model, TrainingState(model, strategy)

    states = [made(value)[1] for value in (1.0, 2.0)]
    everyone = [state.own(None, {}) for state in states]
    model, state = made(0.0)
    state.give_variables(states[0].variables(), everyone, alike=False)
    (memory,) = model.optimizer.hvdtrain_reducer.memories.values()
    assert set(memory.error.numpy()) == {error}
    assert set(memory.shared[0].numpy().ravel()) == {1.0}


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_what_excludes_it(compression: Any) -> None:
    adam = keras.optimizers.Adam
    with pytest.raises(UsageError, match="does not work with groups"):
        hvd.DistributedOptimizer(adam(), compression=compression, groups=2)
    with pytest.raises(UsageError, match="only works with hvdtrain"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression=compression)
    with pytest.raises(UsageError, match="only works with hvdtrain"):
        hvd.allreduce(tf.ones([2000]), compression=compression)
    scaled = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(adam(), compression=compression)
    )
    with pytest.raises(UsageError, match=r"loss scaling .*: compression="):
        scaled.apply([tf.ones([64, 64])], [keras.Variable(np.zeros((64, 64), "float32"))])
    for make in (lambda: hvd.Compression.power_sgd(0), lambda: hvd.Compression.top_k(0.0)):
        with pytest.raises(UsageError):
            make()
