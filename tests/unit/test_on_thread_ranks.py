"""What ranks make together is what one process makes of all examples. The ranks are threads: nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

import hvdtrain.keras as hvd
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.collectives.gradient_accumulation import spread_accumulators
from hvdtrain.collectives.mesh import Mesh, position_in
from hvdtrain.collectives.metrics import average_logs, check_additive
from hvdtrain.collectives.reduction import GradientReducer, Reduction
from hvdtrain.collectives.replicas import check_replicas
from hvdtrain.collectives.statistics import average_statistics
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.data import Part, Share, structures
from hvdtrain.errors import ReplicaError, UsageError
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras.sync_batch_norm import combine_moments
from hvdtrain.keras_internals.variables import seed_variables
from hvdtrain.parallel.group_collectives import sum_parts
from hvdtrain.parallel.state_layout import optimizer_pieces
from hvdtrain.parallel.zero.sharded_optimizer import shard
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.training_state import shared_state
from hvdtrain.trainer.setup import symbolic_data

RANKS = 3
X = np.random.default_rng(1).normal(size=(7, 4)).astype("float32")
ENDS = (0, 4, 6, 7)
"""Rank r has the examples ENDS[r] to ENDS[r + 1]."""


def on_ranks(work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Return what `work` returns on each rank."""
    found = run_ranks(thread_ranks(RANKS), work)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def rows(rank: int) -> np.ndarray:
    return X[ENDS[rank] : ENDS[rank + 1]]


def network() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input([4]),
            keras.layers.Dense(3, "sigmoid", kernel_initializer="ones"),
            keras.layers.Dropout(0.5, seed=1),
        ]
    )
    return model


def test_metrics_are_those_of_all_examples() -> None:
    def evaluated(x: np.ndarray) -> keras.Model:
        model = network()
        # A count, and a mean of shares that differ.
        counter = keras.metrics.FalsePositives(name="wrong")
        model.compile("sgd", "mse", metrics=[counter, "mae"], run_eagerly=True)
        model.test_on_batch(x, x[:, :3] > 0)
        return model

    models = [evaluated(rows(rank)) for rank in range(RANKS)]

    def work(ranks: ThreadRanks) -> Any:
        strategy = HorovodStrategy()
        strategy.set_position(position_in(Mesh(), ranks, ranks.subset))
        share = Share((), len(rows(ranks.rank())), len(X), 0, 0)
        return strategy.logs(models[ranks.rank()], models[ranks.rank()].get_metrics_result(), share)

    whole = {name: float(value) for name, value in evaluated(X).get_metrics_result().items()}
    assert on_ranks(work) == [pytest.approx(whole, rel=1e-6)] * RANKS


def test_logs_that_all_ranks_have_stay_though_some_are_idle() -> None:
    """Rank 0 alone has an example; what is common to all is no question to the states, which have gone on."""

    def work(ranks: ThreadRanks) -> Any:
        logs = {"beta": 0.75, "of_states": float(ranks.rank())}
        asked: list[str] = []
        known = lambda names: asked.extend(names) or {"of_states": 5.0}  # noqa: E731
        return average_logs(logs, int(ranks.rank() == 0), ranks, known), asked

    assert on_ranks(work) == [({"beta": 0.75, "of_states": 5.0}, ["of_states"])] * RANKS


def test_a_metric_whose_states_do_not_add_up_is_refused() -> None:
    class Least(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="least")
            self.value = self.add_variable((), keras.initializers.Constant(9.0), name="value")

    check_additive([keras.metrics.Sum()])
    with pytest.raises(UsageError, match="starts from a value that is not zero"):
        check_additive([Least()])


def test_moving_statistics_are_averaged() -> None:
    models = [
        keras.Sequential([keras.layers.Input([2]), keras.layers.BatchNormalization()])
        for _ in range(RANKS)
    ]
    for rank, model in enumerate(models):
        model.layers[0].moving_mean.assign([rank, 10.0])
    on_ranks(lambda ranks: average_statistics(models[ranks.rank()], (), ranks))
    assert [model.layers[0].moving_mean.numpy().tolist() for model in models] == [[1, 10]] * RANKS


def test_replicas_that_differ_in_one_bit_are_an_error_on_all_ranks() -> None:
    same, other = np.ones(5, "float32"), np.ones(5, "float32")
    other[3] = np.nextafter(other[3], 2)

    def check(ranks: ThreadRanks, value: np.ndarray) -> str:
        try:
            check_replicas(variables=[tf.Variable(same), tf.Variable(value)], process_set=ranks)
        except ReplicaError as error:
            return str(error)
        return ""

    assert on_ranks(lambda ranks: check(ranks, same)) == [""] * RANKS
    found = on_ranks(lambda ranks: check(ranks, other if ranks.rank() == 2 else same))
    assert all("of rank 2 differs from that of ranks 0, 1" in message for message in found)


@pytest.mark.parametrize(
    ("values", "on_gpu", "agree"),
    [
        # As the rows of an embedding after a step on a GPU; at most 1e-5 of the largest value.
        ([[0.5, 1e-9], [0.5, 0.0], [0.5, 2e-9]], True, True),
        ([[0.5, 4.9e-6], [0.5, 0.0], [0.5, 0.0]], True, True),
        ([[0.5, 5.1e-6], [0.5, 0.0], [0.5, 0.0]], True, False),
        ([[0.5, 1e-9], [0.5, 0.0], [0.5, 2e-9]], False, False),
        ([[0.5, float("nan")], [0.5, 0.0], [0.5, 0.0]], True, False),
        ([[1, 2], [1, 2], [1, 3]], True, False),
    ],
)
def test_replicas_that_gpus_rounded_are_made_equal(
    values: list[list[float]], on_gpu: bool, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank with a GPU is enough.
    gpus = iter([on_gpu, False, False])
    monkeypatch.setattr("hvdtrain.collectives.replicas._uses_gpu", lambda: next(gpus))

    def on_rank(ranks: Any) -> list[float]:
        variable = tf.Variable(values[ranks.rank()])
        if agree:
            check_replicas(variables=[variable], process_set=ranks)
        else:
            with pytest.raises(ReplicaError, match="drifted apart"):
                check_replicas(variables=[variable], process_set=ranks)
        return variable.numpy().tolist()

    found = on_ranks(on_rank)
    kept = [tf.constant(one).numpy().tolist() for one in values]
    assert str(found) == str([kept[0]] * RANKS if agree else kept)


def test_one_rank_that_stops_stops_all() -> None:
    assert on_ranks(lambda ranks: any_rank(ranks.rank() == 1, "stop", ranks)) == [True] * RANKS
    assert on_ranks(lambda ranks: any_rank(False, "stop", ranks)) == [False] * RANKS


def test_gradients_are_averaged_and_weighted_ones_added_up() -> None:
    dense, sparse, local = (tf.Variable(np.zeros((4, 2), "float32")) for _ in range(3))

    def work(ranks: ThreadRanks) -> Any:
        reducer = GradientReducer(Reduction(process_set=ranks))
        reducer.register_local(local)
        value = tf.fill([4, 2], 3.0 * (ranks.rank() + 1))
        slices = tf.IndexedSlices(value[:1], tf.constant([ranks.rank()]), tf.constant([4, 2]))
        average = reducer([value, slices, value], [dense, sparse, local])
        total = reducer([value, slices, value], [dense, sparse, local], weighted=True)
        whole = GradientReducer(Reduction(process_set=ranks, scale_local_gradients=False))
        whole.register_local(local)
        kept = [whole([value], [local], weighted=weighted)[0] for weighted in (False, True)]
        every = (*average, *total, *kept)
        return [tf.convert_to_tensor(g).numpy()[:, 0].tolist() for g in every]

    for rank, (dense_mean, sparse_mean, own, dense_sum, sparse_sum, *rest) in enumerate(
        on_ranks(work)
    ):
        assert (dense_mean, dense_sum) == ([6.0] * 4, [18.0] * 4)
        assert (sparse_mean, sparse_sum) == ([1.0, 2.0, 3.0, 0.0], [3.0, 6.0, 9.0, 0.0])
        assert own == [float(rank + 1)] * 4
        # Weighted by shares of a third, it is divided by the ranks already.
        assert rest == [[part * (rank + 1)] * 4 for part in (3.0, 3.0, 9.0)]


def test_a_global_norm_includes_the_local_gradients_of_all_ranks() -> None:
    """So that what is shared is clipped alike."""

    def work(ranks: ThreadRanks) -> Any:
        optimizer = distribute(
            keras.optimizers.SGD(1.0, global_clipnorm=0.5), Reduction(process_set=ranks)
        )
        shared, local = (keras.Variable(np.zeros(2, "float32")) for _ in range(2))
        optimizer.hvdtrain_reducer.register_local(local)
        optimizer.build([shared, local])
        value = tf.constant([3.0, 4.0]) * (ranks.rank() + 1)
        optimizer.apply([value, value], [shared, local])
        return [-shared.numpy(), -local.numpy()]

    shared = np.array([3.0, 4.0]) * np.mean(range(1, RANKS + 1))
    local = [np.array([3.0, 4.0]) * (rank + 1) / RANKS for rank in range(RANKS)]
    norm = np.linalg.norm([shared, *local])
    for rank, found in enumerate(on_ranks(work)):
        np.testing.assert_allclose(
            found, [shared * 0.5 / norm, local[rank] * 0.5 / norm], rtol=1e-6
        )


def step_of(optimizer: Any, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Return variables of 1 after two steps."""
    variables = [
        keras.Variable(np.ones(g.shape, "float32"), name=f"v{i}") for i, g in enumerate(gradients)
    ]
    optimizer.build(variables)
    for _ in range(2):
        optimizer.apply([tf.constant(g) for g in gradients], variables)
    return [v.numpy() for v in variables]


def gradients_of(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.normal(size=shape, scale=3).astype("float32") for shape in ((5, 2), (3,))]


MEAN = [np.mean(each, axis=0) for each in zip(*map(gradients_of, range(RANKS)), strict=True)]
WAYS = {"whole": distribute, "sharded": shard}


def state_of(optimizer: Any) -> list[np.ndarray]:
    return [piece.read() for piece in optimizer_pieces(optimizer)]


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_clipped_is_the_mean(way: str, clip: str) -> None:
    def optimizer() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9, **{clip: 0.5})

    def work(ranks: ThreadRanks) -> Any:
        mine = WAYS[way](optimizer(), Reduction(process_set=ranks))
        variables = step_of(mine, gradients_of(ranks.rank()))
        return variables, state_of(mine)

    plain = optimizer()
    wanted = step_of(plain, MEAN)
    for variables, state in on_ranks(work):
        for found, value in zip([*variables, *state], [*wanted, *state_of(plain)], strict=True):
            assert np.shape(found) == np.shape(value)
            np.testing.assert_allclose(found, value, rtol=1e-5)


class Normed(keras.optimizers.SGD):
    """Looks at the gradients before Keras does."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([g / (1 + tf.norm(g)) for g in grads], trainable_variables)


class ClippedPairs(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(tf.clip_by_norm(g, 0.5), v) for g, v in grads_and_vars])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2 * g for g in grads], trainable_variables)


class Handing(keras.optimizers.SGD):
    """Leaves the work to another optimizer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.other = keras.optimizers.SGD(rate)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.other.apply([tf.sign(g) for g in grads], trainable_variables)


@pytest.mark.parametrize("kind", [Normed, ClippedPairs, Handing])
def test_an_own_apply_looks_at_the_mean(kind: Any) -> None:
    def applied(optimizer: Any, gradients: list[np.ndarray]) -> list[np.ndarray]:
        variables = [keras.Variable(np.ones(g.shape, "float32")) for g in gradients]
        for _ in range(2):
            optimizer.apply_gradients(
                list(zip([tf.constant(g) for g in gradients], variables, strict=True))
            )
        return [v.numpy() for v in variables]

    def work(ranks: ThreadRanks) -> Any:
        mine = distribute(kind(0.1), Reduction(process_set=ranks))
        return applied(mine, gradients_of(ranks.rank()))

    wanted = applied(kind(0.1), MEAN)
    for variables in on_ranks(work):
        for found, value in zip(variables, wanted, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-5)


def test_a_share_that_is_not_in_the_loss_weighs_the_gradients() -> None:
    def work(ranks: ThreadRanks) -> Any:
        optimizer = distribute(
            keras.optimizers.SGD(1.0), Reduction(process_set=ranks, weighted=True)
        )
        share = tf.constant((0.5, 0.25, 0.25)[ranks.rank()])
        with in_step(Step(share, lambda divisor: divisor, share_in_loss=False)):
            (value,) = step_of(optimizer, [np.full(1, 4.0 * ranks.rank(), "float32")])
        return float(value[0])

    assert on_ranks(work) == [1 - 2 * (0.25 * 4 + 0.25 * 8)] * RANKS


def test_predictions_come_in_the_order_of_the_examples() -> None:
    """Of two batches: in the second one only rank 0 has an example, the others a filler."""
    examples = np.arange(8.0)

    def work(ranks: ThreadRanks) -> Any:
        rank = ranks.rank()
        first = Share((), ENDS[rank + 1] - ENDS[rank], 7, ENDS[rank], 0)
        second = Share((), int(rank == 0), 1, 0, 0)
        outputs = [(first, examples[ENDS[rank] : ENDS[rank + 1]]), (second, examples[7:])]
        return gather_predictions(outputs, ranks).tolist()

    assert on_ranks(work) == [examples.tolist()] * RANKS


def test_the_gradient_of_a_sum_of_parts_is_that_of_the_part() -> None:
    parts = np.arange(1.0, RANKS + 1)

    def work(ranks: ThreadRanks) -> Any:
        part = tf.Variable(parts[ranks.rank()])
        with tf.GradientTape() as tape:
            loss = tf.square(sum_parts(part * 1.0, ranks, "layer"))
        return float(tape.gradient(loss, part))

    assert on_ranks(work) == [2 * parts.sum()] * RANKS


def test_moments_of_parts_are_those_of_the_whole() -> None:
    parts = [rows(rank) for rank in range(RANKS)]
    moments = [[np.full(4, len(p)), p.mean(axis=0), p.var(axis=0)] for p in parts]
    mean, variance = combine_moments(tf.constant(moments, tf.float32)).numpy()
    np.testing.assert_allclose(mean, X.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, X.var(axis=0), rtol=1e-5)


def test_ranks_share_all_but_their_seeds() -> None:
    def prepared(rank: int) -> keras.Model:
        strategy = HorovodStrategy()
        strategy.start(seed=1)
        strategy.part = Part(rank, RANKS)
        model = network()
        model.compile(strategy.distribute(keras.optimizers.Adam()), "mse")
        strategy.prepare(model, symbolic_data(structures.spec((X, X[:, :3])), 2), "training")
        return model

    models = [prepared(rank) for rank in range(RANKS)]
    seeds = [[v.numpy().tolist() for v in seed_variables(model)] for model in models]
    assert len({str(seed) for seed in seeds}) == RANKS
    for model in models:
        shared = {id(v) for v in shared_state(model, seed_variables(model))}
        assert {id(v) for v in model.trainable_variables} < shared
        assert {id(v) for v in model.optimizer.variables} < shared


def test_who_has_trained_less_gets_the_mean_of_the_waiting_gradients() -> None:
    """Rank 1 has joined: it has made no steps, and its accumulators hold nothing that counts."""

    def work(ranks: ThreadRanks) -> float:
        variable = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
        optimizer.build([variable])
        (waiting,) = optimizer._accumulated_gradients
        waiting.value.assign([np.nan] if ranks.rank() == 1 else [4.0 + ranks.rank()])
        optimizer._iterations.value.assign(0 if ranks.rank() == 1 else 3)
        spread_accumulators([optimizer], 0, ranks)
        return float(waiting[0])

    assert on_ranks(work) == [5.0] * RANKS


def test_objects_travel_within_a_process_set() -> None:
    def work(ranks: ThreadRanks) -> Any:
        if ranks.rank() == 1:
            return None
        others = ranks.subset([0, 2])
        try:
            hvd.broadcast_object(0, root_rank=1, process_set=others)
        except UsageError as error:
            return (
                hvd.broadcast_object({0: ranks.rank()}, root_rank=2, process_set=others),
                hvd.allgather_object((ranks.rank(),), process_set=others),
                str(error),
            )

    found = on_ranks(work)
    assert found[0] == found[2] == ({0: 2}, [(0,), (2,)], found[0][2])
    assert "root_rank=1 is not in the process set of ranks [0, 2]" in found[0][2]
