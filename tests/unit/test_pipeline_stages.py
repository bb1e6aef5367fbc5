"""Where models are cut: by cost, by hand, and what cannot be cut. No ranks."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.compiled_losses import own_losses
from hvdtrain.keras_internals.deferred_variables import (
    deferred_variables_of,
    initialize,
    is_deferred,
)
from hvdtrain.parallel.pipeline.micro_batch import micro_batches
from hvdtrain.parallel.pipeline.stages import SLACK, balanced, cut
from hvdtrain.parallel.pipeline.transport import stall_limit
from hvdtrain.strategies.batch_dependence import warning_of_parts


def largest(costs: list[float], starts: tuple[int, ...] | list[int]) -> float:
    ends = [0, *starts, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


@given(st.lists(st.integers(0, 20), min_size=3, max_size=8), st.integers(1, 3))
def test_balanced_is_the_best_of_all_cuts(costs: list[int], stages: int) -> None:
    found = balanced([float(c) for c in costs], stages)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert len(found) == stages - 1
    assert sorted(set(found)) == found
    assert largest(costs, found) <= SLACK * min(largest(costs, starts) for starts in every) + 1e-9


def test_balanced_cuts_where_least_crosses_and_not_where_it_must_not() -> None:
    assert balanced([4, 0, 0, 4], 2, [9, 5, 1, 7]) == [2]
    assert balanced([4, 0, 0, 4], 2, [9, 5, 1, 7], {2}) == [1]
    assert balanced([1, 1, 1, 9], 2) == [3]
    with pytest.raises(ValueError, match="1 places"):
        balanced([1, 1, 1], 3, forbidden={1})


def residual() -> keras.Model:
    x = layers.Input((4,), name="x")
    again = layers.Input((2,), name="again")
    first = layers.Dense(4, name="first")(x)
    second = layers.Dense(4, name="second")(first)
    third = layers.Dense(4, name="third")(second)
    total = layers.Add(name="total")([third, first])
    joined = layers.Concatenate(name="joined")([total, again])
    return keras.Model([x, again], [layers.Dense(3, name="out")(joined), first])


def test_skip_connections_cross_all_cuts() -> None:
    whole = residual()
    stages = [cut(whole, i, 3, ["second", "third"]) for i in range(3)]
    assert stages[0].names == (("first",), ("second",), ("third", "total", "joined", "out"))
    assert [len(stage.received) for stage in stages] == [0, 1, 2]
    assert [stage.own_inputs for stage in stages] == [(0,), (), (1,)]
    # The first layer's output passes through the second stage, beside what that makes.
    assert stages[1].passed == (0, None)
    values = [tf.ones((5, 4)), tf.ones((5, 2))]
    wanted, early = whole(values)
    crossing = stages[0].model([values[0]])
    made = stages[1].model([crossing])
    np.testing.assert_array_equal(stages[2].model([values[1], crossing, made]), wanted)
    np.testing.assert_array_equal(crossing, early)
    # The model's second output was made before its last stage.
    assert stages[2].passed == (None, 0)
    variables = [v.path for stage in stages for v in stage.model.variables]
    assert sorted(variables) == sorted(v.path for v in whole.variables)
    assert [v.path for v in stages[1].model.variables] == ["second/kernel", "second/bias"]
    assert [v.path for v in stages[1].others] == [v for v in variables if "second" not in v]
    # The whole model can still be saved.
    assert len(whole.get_config()["layers"]) == 8


def test_a_stage_is_about_as_large_as_the_others() -> None:
    sizes = [8, 64, 64, 8, 8, 64]
    model = keras.Sequential(
        [layers.Input((8,)), *(layers.Dense(n, name=f"dense_of_{i}") for i, n in enumerate(sizes))]
    )
    names = cut(model, 0, 2).names
    # Weights and activations: 80 + 640 + 4224 against 528 + 80 + 640.
    assert names == (
        ("dense_of_0", "dense_of_1", "dense_of_2"),
        ("dense_of_3", "dense_of_4", "dense_of_5"),
    )


def refusal(model: keras.Model, stages: int = 2, begins: Any = None) -> str:
    with pytest.raises(UsageError) as raised:
        cut(model, 0, stages, begins)
    return str(raised.value)


def test_patterns_that_fit_no_cut() -> None:
    assert "matches no layer of the model: first, second" in refusal(residual(), 2, ["fourth"])
    assert "matches several layers: second, third" in refusal(residual(), 2, ["(second|third)"])
    assert "in the model's order" in refusal(residual(), 3, ["third", "second"])
    assert "not its first one" in refusal(residual(), 2, ["first"])
    assert "nor a regular expression" in refusal(residual(), 2, ["("])


def test_a_shared_layer_stays_in_one_stage() -> None:
    x = layers.Input((4,))
    tied = layers.Dense(4, name="tied")
    y = layers.Dense(4, name="between")(tied(x))
    model = keras.Model(x, layers.Dense(2, name="out")(tied(y)))
    assert "layer 'tied' are used in stages 0, 1" in refusal(model, 2, ["between"])
    assert cut(model, 0, 2).names == (("tied", "between"), ("out",))


def test_models_that_cannot_be_cut() -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    class Steps(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    x = layers.Input((3,))
    assert "keras.layers.Input" in refusal(keras.Sequential([layers.Dense(2)]))
    assert "a subclassed model" in refusal(Own())
    assert "overrides train_step" in refusal(Steps(x, layers.Dense(2)(x)))
    assert "too few layers" in refusal(keras.Sequential([x, layers.Dense(2)]))
    two = keras.Sequential([x, layers.Dense(2), layers.ReLU(name="last")])
    assert "stage 1 (last) has no weights" in refusal(two, 2, ["last"])


def test_models_without_values_are_cut_alike() -> None:
    def make() -> keras.Model:
        return keras.Sequential([layers.Input((4,)), *(layers.Dense(64) for _ in range(3))])

    keras.utils.set_random_seed(1)
    wanted = make().layers[-1].get_weights()[0]
    keras.utils.set_random_seed(1)
    with deferred_variables_of():
        whole = make()
    stage = cut(whole, 1, 2)
    for variable in stage.model.variables:
        initialize(variable)
    np.testing.assert_array_equal(stage.model.layers[-1].get_weights()[0], wanted)
    assert [tuple(v.shape) for v in stage.others if is_deferred(v)] == [(64, 64)]


def share(examples: int, total: int) -> Share:
    rows = tf.range(max(examples, 1) * 2)
    return Share(({"a": tf.reshape(rows, (-1, 2))}, rows[::2]), examples, total, 0, 0)


def test_micro_batches_are_the_share_in_order() -> None:
    parts = micro_batches(share(7, 10), 3)
    assert [part.examples for part in parts] == [2, 2, 3]
    assert [part.weight for part in parts] == [0.2, 0.2, 0.3]
    x, y, weight = zip(*(part.data for part in parts), strict=True)
    np.testing.assert_array_equal(
        np.concatenate([one["a"] for one in x])[:, 0], np.arange(0, 14, 2)
    )
    np.testing.assert_array_equal(np.concatenate(y), np.arange(0, 14, 2))
    assert weight == (None, None, None)
    assert parts[0].size == parts[1].size != parts[2].size


def test_few_examples_make_few_micro_batches_and_none_one_that_counts_nothing() -> None:
    assert [part.examples for part in micro_batches(share(2, 4), 8)] == [1, 1]
    (filler,) = micro_batches(share(0, 4), 8)
    assert (filler.examples, filler.weight) == (1, 0.0)


def test_the_limit_of_a_wait_is_horovods() -> None:
    assert stall_limit({}) == 50
    assert stall_limit({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7.5"}) == 7.5
    assert stall_limit({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}) == float("inf")
    assert stall_limit({"HOROVOD_STALL_CHECK_DISABLE": "1"}) == float("inf")


def test_what_micro_batches_do_alike_is_not_warned_of() -> None:
    words = layers.Input((5,), dtype="int32")
    x = layers.LSTM(4)(layers.Embedding(9, 4, mask_zero=True)(words))
    x = layers.LayerNormalization()(layers.Dropout(0.0)(x))
    x = keras.ops.softmax(x - keras.ops.mean(x, axis=-1, keepdims=True), axis=1)
    x = layers.Flatten()(keras.ops.stack([x, keras.ops.expand_dims(x, -2)[:, 0]], axis=-2))
    x = layers.UnitNormalization()(layers.Concatenate()([x, x]))[:, :4]
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(2, activity_regularizer="l2")])
    number = layers.Input(())
    x = x + layers.Dense(4)(keras.ops.expand_dims(number, -1))
    model = keras.Model([words, number], inner(x))
    for loss in ("mse", keras.losses.Huber(), keras.losses.mean_absolute_error):
        model.compile(loss=loss)
        model._compile_loss.build(keras.KerasTensor((4, 2)), keras.KerasTensor((4, 2)))
        assert warning_of_parts(model, "a part", own_losses(model)) is None


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - keras.ops.mean(x, axis=0, keepdims=True),
        lambda x: x * keras.ops.max(x),
        lambda x: keras.ops.matmul(keras.ops.matmul(x, keras.ops.transpose(x)), x),
        lambda x: keras.ops.softmax(x, axis=0),
        lambda x: keras.ops.cumsum(x, axis=-2),
        layers.UnitNormalization(axis=0),
    ],
    ids=["mean", "maximum", "similarities", "softmax", "sum so far", "layer"],
)
def test_what_looks_along_the_examples_is_warned_of(mix: Any) -> None:
    x = layers.Input((4,))
    inner = keras.Model(x, layers.Dense(2)(mix(x)))
    for model in (inner, keras.Sequential([layers.Input((4,)), inner])):
        warning = warning_of_parts(model, "a part")
        assert warning is not None and "looks at several examples at once" in warning
