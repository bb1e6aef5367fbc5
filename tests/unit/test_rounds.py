"""LocalSGD and DiLoCo against NumPy. The ranks are threads: nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

from hvdtrain import DiLoCo, LocalSGD
from hvdtrain.collectives.compression import INT8_BLOCK, int8_sum
from hvdtrain.collectives.mesh import Mesh, position_in
from hvdtrain.data import Share
from hvdtrain.data.share import find_share
from hvdtrain.errors import UsageError
from hvdtrain.strategies import rounds
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.rounds import RoundRunner
from hvdtrain.trainer.strategy_choice import make_strategy

RANKS, RATE, MOMENTUM = 3, 0.1, 0.9
RNG = np.random.default_rng(3)
BATCHES = [5, 7, 6, 2, 3]
"""Examples; of two one rank has none."""
X = [RNG.normal(size=(examples, 4)).astype("float32") for examples in BATCHES]
Y = [x @ np.arange(1.0, 5.0, dtype="float32")[:, None] + 0.5 for x in X]
Weights = list[np.ndarray]


def network() -> keras.Model:
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1, name="dense")])
    for variable in model.trainable_variables:
        variable.assign(np.full(variable.shape, 0.25, "float32"))
    return model


class Rank:
    """A rank with a model of its own, on `ranks`."""

    def __init__(self, ranks: ThreadRanks, sync: Any, plain: Any = None, model: Any = None) -> None:
        self.strategy = HorovodStrategy(runner=lambda here: RoundRunner(sync, here))
        self.strategy._wrap = make_strategy("horovod", sync=sync)._wrap
        self.strategy.set_position(position_in(Mesh(), ranks, ranks.subset))
        self.model = model or network()
        plain = plain or keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        optimizer = self.strategy.distribute(plain)
        self.model.compile(optimizer, "mse", run_eagerly=True)
        optimizer.build(self.model.trainable_variables)
        self.steps = self.strategy.runner.steps(self.model, ())
        self.rounds = self.strategy.runner.rounds

    def train(self, numbers: Sequence[int]) -> None:
        rank = self.strategy.position.everyone.rank()
        for number in numbers:
            begin, end, examples = find_share(len(X[number]), rank, RANKS)
            data = (X[number][begin:end], Y[number][begin:end])
            self.steps.train([Share(data, examples, len(X[number]), begin, None)])

    def weights(self) -> Weights:
        return [v.numpy() for v in self.model.trainable_variables]

    def momenta(self) -> Weights:
        return [v.numpy() for v in self.model.optimizer.momentums]


def trained(sync: Any, numbers: Sequence[int], end: bool = True) -> list[Rank]:
    """Return ranks that have trained on these batches."""
    everyone = thread_ranks(RANKS)
    found = [Rank(ranks, sync) for ranks in everyone]

    def work(ranks: ThreadRanks) -> None:
        found[ranks.rank()].train(numbers)
        if end:
            found[ranks.rank()].strategy.end_epoch(found[ranks.rank()].model)

    together(everyone, work)
    return found


def together(everyone: list[ThreadRanks], work: Any) -> list[Any]:
    results = run_ranks(everyone, work)
    for value in results:
        if isinstance(value, Exception):
            raise value
    return results


def mean(parts: np.ndarray, ranks: list[Weights]) -> Weights:
    pairs = zip(*ranks, strict=True)
    return [sum(p * w for p, w in zip(parts, each, strict=True)) for each in pairs]


def rounded(values: np.ndarray, sync: DiLoCo) -> np.ndarray:
    """As it travels."""
    if sync.exchange == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).astype(float)
    scale = abs(values).max() / 127 if sync.exchange == "int8" else 0.0
    return np.round(values / scale) * scale if scale else values


def in_numpy(sync: Any, numbers: Sequence[int]) -> tuple[Weights, list[Weights]]:
    """Return the weights of all ranks, and the momenta of each, in float64."""
    begin = [np.full((4, 1), 0.25), np.full(1, 0.25)]
    outer = [np.zeros((4, 1)), np.zeros(1)]
    ranks = [[w.copy() for w in begin] for _ in range(RANKS)]
    momenta = [[np.zeros((4, 1)), np.zeros(1)] for _ in range(RANKS)]
    counts, steps = np.zeros(RANKS), 0
    for number in numbers:
        for rank in range(RANKS):
            first, last, examples = find_share(len(X[number]), rank, RANKS)
            if examples:
                x, y = X[number][first:last].astype(float), Y[number][first:last].astype(float)
                far = 2 * (x @ ranks[rank][0] + ranks[rank][1] - y) / examples
                for i, gradient in enumerate((x.T @ far, far.sum(axis=0))):
                    momenta[rank][i] = MOMENTUM * momenta[rank][i] - RATE * gradient
                    ranks[rank][i] = ranks[rank][i] + momenta[rank][i]
            counts[rank] += examples
        steps += 1
        if steps == sync.every or number == numbers[-1]:
            parts = counts / counts.sum()
            if isinstance(sync, LocalSGD):
                begin, one = mean(parts, ranks), mean(parts, momenta)
                momenta = [[m.copy() for m in one] for _ in range(RANKS)]
            else:
                sent = [
                    rounded(
                        np.concatenate(
                            [p * (w - b).ravel() for w, b in zip(each, begin, strict=True)]
                        ),
                        sync,
                    )
                    for p, each in zip(parts, ranks, strict=True)
                ]
                kernel, bias = np.split(rounded(sum(sent), sync), [4])
                for i, change in enumerate((kernel[:, None], bias)):
                    outer[i] = sync.outer_momentum * outer[i] + change
                    ahead = change + sync.outer_momentum * outer[i]
                    begin[i] = begin[i] + sync.outer_learning_rate * ahead
            ranks = [[w.copy() for w in begin] for _ in range(RANKS)]
            counts, steps = np.zeros(RANKS), 0
    return begin, momenta


@pytest.mark.parametrize(
    "sync",
    [
        LocalSGD(2),
        LocalSGD(1),
        DiLoCo(2, 0.8, 0.6),
        DiLoCo(2, 0.8, 0.6, "bfloat16"),
        DiLoCo(2, 0.8, 0.6, "int8"),
    ],
    ids=str,
)
def test_as_in_numpy(sync: Any) -> None:
    """With batches that cannot be divided, one in which a rank is idle, and a last round that is short."""
    numbers = range(len(BATCHES))
    wanted, momenta = in_numpy(sync, numbers)
    ranks = trained(sync, numbers)
    for number, rank in enumerate(ranks):
        pairs = zip(rank.weights() + rank.momenta(), wanted + momenta[number], strict=True)
        for found, value in pairs:
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
        assert int(rank.model.optimizer.iterations) == len(BATCHES)
    assert len({str(rank.weights()) for rank in ranks}) == 1


@pytest.mark.parametrize("sync", [LocalSGD(2), DiLoCo(2, 0.8, 0.6)], ids=str)
def test_little_is_synchronized_at_once(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rounds, "AT_ONCE", 4
    )  # The kernel has 4 elements, so that the bias is apart.
    test_as_in_numpy(sync)


def test_one_step_a_round_is_synchronous_training() -> None:
    # Where a rank has no example, the momentum of its weights stands still for a step.
    full = [number for number, examples in enumerate(BATCHES) if examples >= RANKS]
    plain = network()
    plain.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse", run_eagerly=True)
    for number in full:
        plain.train_on_batch(X[number], Y[number])
    for rank in trained(LocalSGD(1), full):
        for found, value in zip(rank.weights(), plain.trainable_variables, strict=True):
            np.testing.assert_allclose(found, value.numpy(), rtol=1e-5)


def test_nadams_product_of_momenta_counts_the_steps_of_an_idle_rank() -> None:
    """Of the batch of two, one rank has no example."""
    everyone = thread_ranks(RANKS)
    ranks = [Rank(one, LocalSGD(2), keras.optimizers.Nadam(RATE)) for one in everyone]

    def work(own: ThreadRanks) -> None:
        rank = ranks[own.rank()]
        rank.train(range(len(BATCHES)))
        rank.strategy.end_epoch(rank.model)
        rank.strategy.check(rank.model, "after the epoch")

    together(everyone, work)
    plain = keras.optimizers.Nadam(RATE)
    plain.build([weight := keras.Variable([0.0])])
    for _ in BATCHES:
        plain.apply([tf.ones(1)], [weight])
    for rank in ranks:
        assert float(rank.model.optimizer._u_product) == float(plain._u_product)


class Summed(keras.Sequential):
    """Its loss is a sum over the examples."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return keras.ops.sum((y - y_pred) ** 2)


def test_an_evaluation_with_a_loss_that_is_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    # One switch for all ranks, which are threads here; there is no tf.function.
    monkeypatch.setattr(tf.config, "run_functions_eagerly", lambda run_eagerly: None)
    x, y = X[1], Y[1]
    plain = Summed(network().layers)
    plain.compile("sgd")
    wanted = plain.test_on_batch(x, y, return_dict=True)["loss"]
    everyone = thread_ranks(RANKS)
    ranks = [Rank(one, LocalSGD(2), model=Summed(network().layers)) for one in everyone]

    def work(own: ThreadRanks) -> float:
        rank = ranks[own.rank()]
        begin, end, examples = find_share(len(x), own.rank(), RANKS)
        share = Share((x[begin:end], y[begin:end]), examples, len(x), begin, None)
        rank.steps.probe_test(share)
        logs = rank.strategy.logs(rank.model, rank.steps.test(share), share)
        return float(logs["loss"])

    assert together(everyone, work) == pytest.approx([wanted] * RANKS, rel=1e-5)


@pytest.mark.parametrize("sync", [LocalSGD(3), DiLoCo(3, exchange="int8")], ids=str)
def test_a_round_goes_on_from_its_state(sync: Any) -> None:
    """To the bit, in other processes; of another number of ranks from the average."""
    before = trained(sync, range(2), end=False)
    states = [rank.rounds.state() for rank in before]
    shared = [[v.numpy() for v in rank.rounds.replicated_variables] for rank in before]
    everyone = thread_ranks(RANKS)
    after = [Rank(ranks, sync) for ranks in everyone]
    for rank, state, values in zip(after, states, shared, strict=True):
        rank.model.optimizer.iterations.assign(2)
        for variable, value in zip(rank.rounds.replicated_variables, values, strict=True):
            variable.assign(value)
        rank.rounds.restore(state)
    together(everyone, lambda ranks: after[ranks.rank()].train(range(2, 5)))
    undisturbed = trained(sync, range(5), end=False)
    for one, other in zip(after, undisturbed, strict=True):
        assert str(one.weights() + one.momenta()) == str(other.weights() + other.momenta())
    (alone,) = [Rank(ranks, sync) for ranks in thread_ranks(1)]
    alone.rounds.restore_average(states)
    parts = [state["own"] / state["all"] for state in states]
    wanted = mean(np.array(parts), [rank.weights() for rank in before])
    np.testing.assert_allclose(alone.weights()[0], wanted[0], rtol=1e-6)


def test_a_sum_of_int8_blocks() -> None:
    """Blocks of other sizes than the tensor's; each number is off by half a level of its block for each rounding."""
    values = [RNG.normal(size=700).astype("float32") * 10.0**rank for rank in range(RANKS)]
    wanted = sum(values)
    found = together(
        thread_ranks(RANKS),
        lambda ranks: int8_sum(tf.constant(values[ranks.rank()]), "x", ranks).numpy(),
    )
    assert all(np.array_equal(one, found[0]) for one in found)
    for first in range(0, 700, INT8_BLOCK):
        block = slice(first, first + INT8_BLOCK)
        levels = sum(abs(v[block]).max() for v in [*values, found[0]]) / 127
        assert abs(found[0][block] - wanted[block]).max() <= levels / 2 * 1.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync": 8}, r"sync=8: pass hvdtrain.LocalSGD"),
        ({"sync": LocalSGD(2), "shard_optimizer": True}, "use only one of the two"),
        ({"sync": LocalSGD(2), "layout": Mesh(2)}, "use only one of the two"),
        ({"sync": LocalSGD(2), "wanted": "tpu"}, "but the strategy is tpu"),
    ],
    ids=str,
)
def test_what_excludes_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_strategy(**{"wanted": "horovod"} | arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(0),
        lambda: DiLoCo(4, outer_learning_rate=0),
        lambda: DiLoCo(4, outer_momentum=1.0),
        lambda: DiLoCo(4, exchange="int4"),  # type: ignore[arg-type]
    ],
)
def test_values_out_of_range(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def test_optimizers_that_decide_alone_are_refused() -> None:
    """Whose ranks would skip other steps, or add up gradients that wait."""
    position = position_in(Mesh(), (ranks := thread_ranks(1)[0]), ranks.subset)
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.optimizers.SGD(gradient_accumulation_steps=2),
        keras.optimizers.SGD(use_ema=True),
    ):
        model = network()
        model.compile(optimizer, "mse")
        with pytest.raises(UsageError, match=r"sync=DiLoCo.* does not work with"):
            RoundRunner(DiLoCo(2), position).steps(model, ())
