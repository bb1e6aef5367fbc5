"""What the reduction decides before anything travels: options, groups, names, fingerprints."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

import hvdtrain.keras as hvd
from hvdtrain.collectives import reduction
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.compression import BF16Compressor
from hvdtrain.collectives.reduction import GradientReducer, Reduction
from hvdtrain.collectives.replicas import broadcast_global_variables, check_replicas, fingerprints
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.collectives.tensor_names import (
    InstanceName,
    in_this_graph,
    name_by_places,
    variables_name,
)
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.variables import replicated_variables, trained_variables

SGD = keras.optimizers.SGD
EVERYONE = ALL_RANKS


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> None:
    hvd.init()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"op": hvd.Max}, "op: use Average, Sum or Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"compression": "fp16"}, "compression='fp16': pass hvdtrain.keras.Compression.none"),
        ({"groups": 0}, "groups=0"),
        ({"groups": "all"}, "a positive number or a list of lists"),
        ({"op": hvd.Adasum, "groups": 2}, "groups do not work with op=Adasum"),
        ({"op": hvd.Adasum, "compression": hvd.Compression.bf16}, "bf16 does not work"),
        ({"backward_passes_per_step": 0}, "pass an integer, 1 or more"),
    ],
)
def test_options_that_exclude_each_other(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hvd.DistributedOptimizer(SGD(), **arguments)


def test_a_saved_optimizer_brings_its_accumulation() -> None:
    saved = SGD(gradient_accumulation_steps=2)
    wrapped = hvd.DistributedOptimizer(saved, backward_passes_per_step=2)
    assert wrapped.gradient_accumulation_steps == 2
    assert wrapped.hvdtrain_reducer.reduction.postscale_factor == 2.0


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(UsageError, match="not str"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(UsageError, match="use only one of them"):
        hvd.DistributedOptimizer(SGD(gradient_accumulation_steps=2), backward_passes_per_step=3)
    with pytest.raises(UsageError, match="has no weights yet"):
        hvd.PartialDistributedOptimizer(SGD(), local_layers=keras.layers.Dense(1))
    with pytest.raises(UsageError, match=r"not a keras\.layers\.Layer"):
        hvd.PartialDistributedOptimizer(SGD(), local_layers=[3])


class Twice(SGD):
    """Changes the gradients, and leaves the work to Keras."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2 * g for g in grads], trainable_variables)


def test_optimizers_that_work_past_the_reduction() -> None:
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD()))
    with pytest.raises(UsageError, match="pass one optimizer for all weights"):
        hvd.DistributedOptimizer(several)
    weight = keras.Variable([1.0])
    distributed = hvd.DistributedOptimizer(Twice(0.25))
    distributed.apply([tf.ones(1)], [weight])
    assert float(weight[0]) == 0.5
    distributed.apply([], [])


@pytest.mark.parametrize("eager", [True, False])
def test_accumulated_gradients_have_each_the_share_of_its_step(eager: bool) -> None:
    """A share of 1/4 in the second of two steps; the loss knows nothing of it."""
    weight = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(SGD(1.0, gradient_accumulation_steps=2))
    optimizer.build([weight])
    share = tf.Variable(1.0)
    apply = lambda: optimizer.apply([tf.ones(1)], [weight])  # noqa: E731
    step = apply if eager else tf.function(apply, autograph=False)
    with in_step(Step(share, lambda divisor: divisor, share_in_loss=False)):
        step()
        share.assign(0.25)
        step()
    assert float(weight[0]) == -(1 + 0.25) / 2


def test_num_groups_is_an_older_name() -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(SGD(), num_groups=3)
    assert optimizer.hvdtrain_reducer.reduction.groups == 3


def grouped(groups: Any, variables: list[Any]) -> list[list[int]]:
    reducer = GradientReducer(Reduction(groups=groups))
    gradients = {i: tf.zeros([1]) for i in range(len(variables))}
    how = dict.fromkeys(gradients, reducer.reduction)
    return [sorted(group) for group in reducer._groups(list(gradients), variables, gradients, how)]


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    v = [tf.Variable([0.0]) for _ in range(5)]
    assert grouped([], v) == [[0], [1], [2], [3], [4]]
    assert grouped(2, v) == [[0, 1, 2], [3, 4]]
    assert grouped(9, v) == [[0], [1], [2], [3], [4]]
    assert grouped([[v[4], v[0]], [v[2]]], v) == [[0, 4], [1], [2], [3]]
    monkeypatch.setattr(reduction, "GROUP", 2)
    assert grouped(1, v) == [[3, 4], [1, 2], [0]], "no larger than that"
    assert grouped(2, [tf.constant([0.0])] * 5) == [[0, 1, 2], [3, 4]], "of unknown size"


def buckets(shapes: list[Any], holders: list[Any] | None = None, **options: Any) -> list[list[int]]:
    """The groups of gradients of variables of these shapes, each held by all ranks or by those of `holders`."""
    reducer = GradientReducer(Reduction(**options))
    ready = {i: tf.zeros(shape or []) for i, shape in enumerate(shapes)}
    variables = [
        tf.Variable(ready[i], shape=tf.TensorShape(shape)) for i, shape in enumerate(shapes)
    ]
    reducer.build(variables)
    ranks = holders or [reducer.reduction.process_set] * len(shapes)
    how = {
        i: replace(reducer._options_for(variables[i], weighted=False), process_set=each)
        for i, each in enumerate(ranks)
    }
    return list(reducer._groups(list(ready), variables, ready, how))


SMALL, LARGE = [200_000], [262_144]  # 0.8 MB, and 1 MiB.


def test_small_gradients_go_together() -> None:
    """The last first, as the backward pass computes them."""
    assert buckets([SMALL] * 7) == [[6, 5, 4, 3, 2], [1, 0]]
    assert buckets([SMALL, SMALL, LARGE, SMALL, None]) == [[4], [3], [2], [1, 0]]
    assert buckets([[0], LARGE, [0], SMALL]) == [[3, 2], [1], [0]]
    assert buckets([SMALL] * 2, op=hvd.Adasum) == [[0], [1]]


@pytest.mark.parametrize(
    ("compression", "groups"),
    [
        (hvd.Compression.top_k(), [[5], [4], [3, 2], [1], [0]]),
        (hvd.Compression.power_sgd(), [[5, 4, 3, 2, 1, 0]]),  # It leaves all vectors as they are.
        (hvd.Compression.bf16, [[5, 4, 3, 2], [1], [0]]),
    ],
)
def test_what_is_not_compressed_goes_together(compression: Any, groups: list[list[int]]) -> None:
    shapes = [[0], [16_384], [1023], [1023], [1024], [16_383]]
    assert buckets(shapes, compression=compression) == groups


def test_buckets_of_divided_variables() -> None:
    """What all ranks hold goes in the same buckets on each, also if its part of other variables is larger."""
    everyone, own = thread_ranks(1)[0], thread_ranks(2)[0]
    held = [everyone, own, everyone]
    for part in (SMALL, LARGE):
        assert buckets([SMALL, part, SMALL], held) == [[2, 0], [1]]


class FirstInHalf:
    """A compressor as a user may write it: not all that it sends has the same dtype."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.shape[0] == 1 else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, dtype: Any) -> tf.Tensor:
        return tf.cast(tensor, dtype)


def test_names_of_groups_tell_their_variables() -> None:
    """A rank without a gradient for a variable must not add those of its neighbours to others'."""
    names = []

    class Recorded(ThreadRanks):
        def _allreduce(self, wire: tf.Tensor, name: str, *how: Any) -> tf.Tensor:
            names.append(name)
            return wire

    everyone = thread_ranks(2)[0]
    ranks = Recorded(everyone.job, everyone.job_rank, everyone.members)
    reducer = GradientReducer(Reduction(process_set=ranks), prefix=lambda *_: "g")
    variables = [tf.Variable([0.0]) for _ in range(6)]
    for missing in (None, 2, 3):
        reducer([None if i == missing else tf.zeros([1]) for i in range(6)], variables)
    assert names == ["g_0-5", "g_0-1_3-5", "g_0-2_4-5"]


@pytest.mark.parametrize("groups", [None, 1, []])
def test_dtypes_of_a_group(groups: Any) -> None:
    everyone = thread_ranks(2)
    gradients = [tf.ones([n]) * n for n in (1, 2, 3)] + [tf.cast([4.0, 4.0], tf.float64)]

    def work(ranks: ThreadRanks) -> list[Any]:
        reduction = Reduction(process_set=ranks, compression=FirstInHalf, groups=groups)
        mine = [gradient * (1 + 2 * ranks.rank()) for gradient in gradients]
        return GradientReducer(reduction)(mine, [tf.Variable(gradient) for gradient in gradients])

    for found in run_ranks(everyone, work):
        assert [each.dtype for each in found] == [each.dtype for each in gradients]
        assert [each.numpy().tolist() for each in found] == [[2], [4, 4], [6, 6, 6], [8, 8]]


def test_sparse_gradients_go_alone() -> None:
    v = [tf.Variable([0.0]) for _ in range(3)]
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    gradients = {0: tf.zeros([1]), 1: slices, 2: tf.zeros([1])}
    reducer = GradientReducer(Reduction(groups=1))
    how = dict.fromkeys(gradients, reducer.reduction)
    assert list(reducer._groups([0, 1, 2], v, gradients, how)) == [[2, 0], [1]]


def test_names_by_places_in_the_state_of_an_elastic_job() -> None:
    """A worker that joins later has used other objects before."""
    before, late = InstanceName("gradient"), InstanceName("gradient")
    old, new = ([tf.Variable(0.0) for _ in range(2)] for _ in range(2))
    before([], EVERYONE), variables_name([old[1]], EVERYONE)
    found = []
    for instance, variables in ((InstanceName("gradient"), old), (late, new)):
        name_by_places([instance], variables)
        tape = variables_name(list(reversed(variables)), EVERYONE)
        found.append((instance([], EVERYONE), tape, variables_name(variables, EVERYONE)))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3 and found[0][0] == "hvdtrain_gradient_state_0"
    name_by_places([], [])
    assert late([], EVERYONE) != found[1][0]
    assert variables_name(new, EVERYONE) != found[1][2]


def test_names_count_uses_not_objects() -> None:
    first, never_used, second = (InstanceName("x") for _ in range(3))
    del never_used
    number = int(first((), EVERYONE).rsplit("_", 1)[1])
    assert second((), EVERYONE) == f"hvdtrain_x_{number + 1}"
    assert first((), EVERYONE) == f"hvdtrain_x_{number}"


def test_names_of_variables() -> None:
    a, b = tf.Variable(0.0), keras.Variable(0.0)
    assert variables_name([a, b], EVERYONE) == variables_name([a, b.value], EVERYONE)
    assert variables_name([a, b], EVERYONE) != variables_name([b, a], EVERYONE)
    assert variables_name([a, tf.constant(1.0)], EVERYONE) == variables_name(
        [a, tf.constant(2.0)], EVERYONE
    )


def test_names_in_a_graph() -> None:
    assert in_this_graph("p", EVERYONE) == in_this_graph("p", EVERYONE) == "p"
    for _ in range(2):
        with tf.Graph().as_default():
            assert [in_this_graph("p", EVERYONE) for _ in range(3)] == ["p", "p_again1", "p_again2"]


def test_names_are_counted_for_each_process_set() -> None:
    pair = SimpleNamespace(ranks=[0, 1], is_global=lambda: False)
    names = [InstanceName("x") for _ in range(3)]
    begin = int(names[0]((), EVERYONE).rsplit("_", 1)[1])
    # Ranks that are not in the pair have none of its events.
    names[1]((), pair)
    assert names[2]((), EVERYONE) == f"hvdtrain_x_{begin + 1}"
    with tf.Graph().as_default():
        assert [in_this_graph("p", pair), in_this_graph("p", EVERYONE)] == ["p_of_0-1", "p"]


def test_bf16_rounds_and_leaves_integers() -> None:
    values = tf.constant([1.0, 1.0 + 2.0**-9, 3.0e38, float("inf"), -0.0])
    bits, dtype = BF16Compressor.compress(values)
    assert bits.dtype == tf.uint16
    back = BF16Compressor.decompress(bits, dtype).numpy()
    assert back == pytest.approx(values.numpy(), rel=2.0**-8)
    whole = tf.constant([1, 2])
    assert BF16Compressor.decompress(*BF16Compressor.compress(whole)) is whole


def test_fingerprints_see_every_bit() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype("float32")
    flipped = values.copy()
    flipped.view("uint32")[777] ^= 1
    kept, other, same = fingerprints([tf.Variable(v) for v in (values, flipped, values)])
    assert (kept == same).all()
    assert (kept != other).any()
    mixed = [tf.Variable(v) for v in (True, 3, tf.zeros([0]), tf.cast(1, tf.bfloat16))]
    assert fingerprints(mixed).shape == (4, 8)
    assert fingerprints([]).shape == (0, 8)


def test_which_variables_are_replicated() -> None:
    layers = keras.layers
    normalization, dense = layers.BatchNormalization(), layers.Dense(1)
    model = keras.Sequential([layers.Input((2,)), layers.Dropout(0.1), normalization, dense])
    optimizer = hvd.DistributedOptimizer(SGD(momentum=0.9), backward_passes_per_step=2)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.register_local_var(dense.bias)

    def ids(variables: list[Any]) -> set[int]:
        return {id(v) for v in variables}

    replicated = ids(replicated_variables(model, local=[dense.bias]))
    assert id(normalization.moving_mean) in replicated
    assert id(optimizer.variables[0]) in replicated  # iterations
    assert id(optimizer.momentums[0]) in replicated
    assert id(dense.bias) not in replicated
    assert id(optimizer.momentums[-1]) not in replicated  # the local variable's
    assert not replicated & ids(optimizer._accumulated_gradients)
    assert not replicated & ids([model.layers[0].seed_generator.state])
    trained = ids(trained_variables(model))
    assert id(normalization.moving_mean) not in trained
    assert id(dense.kernel) in trained
    assert id(dense.bias) not in trained
    check_replicas(model)  # alone: nothing to compare


def test_broadcast_global_variables_says_what_to_use() -> None:
    with pytest.raises(UsageError, match="broadcast_variables"):
        broadcast_global_variables(0)
