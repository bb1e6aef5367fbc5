"""Splitting a model by a plan, on one of two ranks that are only said to be there: nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from thread_ranks import thread_ranks

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.deferred_variables import (
    deferred_variables_of,
    initialize,
    is_deferred,
)
from hvdtrain.keras_internals.shards import Shard, shard_of
from hvdtrain.parallel.tensor.convert import convert
from hvdtrain.parallel.tensor.split import PartDropout


def position(index: int = 0, size: int = 2) -> Any:
    """A rank of a tensor group."""
    return SimpleNamespace(tensor_set=thread_ranks(size)[index])


def mlp(*between: layers.Layer, last: layers.Layer | None = None) -> keras.Model:
    """up, whatever is between, down."""
    up, down = layers.Dense(8, name="up"), layers.Dense(4, name="down")
    return keras.Sequential([keras.Input((4,)), up, *between, last or down], name="mlp")


ORTHOGONAL = keras.regularizers.OrthogonalRegularizer()
PAIR = {"up": "column", "down": "row"}


def is_open(model: keras.Model) -> tuple[bool, bool]:
    """Whether up keeps its output split, and down takes it so."""
    up, down = model.get_layer("up"), model.get_layer("down")
    assert model.get_layer("down").input_spec.axes == {-1: 4 if down.input_is_split else 8}
    return not up.gather_output, down.input_is_split


@pytest.mark.parametrize(
    "between",
    [
        [],
        [layers.ReLU()],
        [layers.Activation("gelu"), layers.Dropout(0.5)],
        [layers.LeakyReLU(), layers.Identity()],
    ],
)
def test_elementwise_layers_keep_the_pair_split(between: list[layers.Layer]) -> None:
    assert is_open(convert(mlp(*between), PAIR, position())) == (True, True)


@pytest.mark.parametrize(
    "between",
    [
        [layers.Activation("softmax")],
        [layers.LayerNormalization()],
        [layers.BatchNormalization()],
        [layers.Reshape((2, 4)), layers.Flatten()],
        [layers.Dense(8)],
        [layers.Dropout(0.5, noise_shape=(None, 1))],
        [layers.ReLU(activity_regularizer="l2")],
        [layers.Activation(lambda x: x / keras.ops.sum(x))],
        [layers.PReLU()],
        [layers.UnitNormalization()],
    ],
)
def test_whatever_looks_at_several_elements_gets_all_of_them(between: list[layers.Layer]) -> None:
    assert is_open(convert(mlp(*between), PAIR, position())) == (False, False)


@pytest.mark.parametrize(
    "up",
    [
        {"activation": "softmax"},
        {"activation": lambda x: x - keras.ops.max(x)},
        {"activity_regularizer": "l1"},
    ],
)
def test_a_column_layer_that_looks_at_all_its_outputs_gathers(up: dict[str, Any]) -> None:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="up", **up), layers.Dense(4, name="down")]
    )
    assert is_open(convert(model, PAIR, position())) == (False, False)


def test_a_column_layer_alone_gathers_and_a_row_layer_alone_takes_its_part() -> None:
    assert convert(mlp(), {"up": "column"}, position()).get_layer("up").gather_output
    assert not convert(mlp(), {"down": "row"}, position()).get_layer("down").input_is_split


OTHERS = {"other rank": {"gate": "column"}}


def functional(kind: str) -> keras.Model:
    x = keras.Input((4,))
    up, down = layers.Dense(8, name="up"), layers.Dense(4, name="down")
    h = up(x)
    if kind == "also an output":
        return keras.Model(x, [down(h), h])
    if kind == "also elsewhere":
        return keras.Model(x, layers.Concatenate()([down(h), layers.Dense(2)(h)]))
    if kind == "meets a whole":
        return keras.Model(x, down(layers.Add()([h, layers.Dense(8)(x)])))
    if kind == "row layer twice":
        return keras.Model(x, layers.Add()([down(h), down(layers.Dense(8)(x))]))
    if kind == "shared dropout":
        drop = layers.Dropout(0.5)
        whole = layers.Dense(4)(drop(layers.Dense(8)(x)))
        return keras.Model(x, layers.Add()([down(drop(h)), whole]))
    if kind == "other rank":
        gate = layers.Dense(8, name="gate")(layers.RepeatVector(3)(x))
        return keras.Model(x, down(layers.Multiply()([h, gate])))
    assert kind == "operation"
    return keras.Model(x, down(keras.ops.flip(h, axis=-1)))


@pytest.mark.parametrize(
    "kind",
    [
        "also an output",
        "also elsewhere",
        "meets a whole",
        "row layer twice",
        "shared dropout",
        "other rank",
        "operation",
    ],
)
def test_a_part_never_passes_for_the_whole(kind: str) -> None:
    model = convert(functional(kind), PAIR | OTHERS.get(kind, {}), position())
    assert is_open(model) == (False, False)
    assert not any(isinstance(layer, PartDropout) for layer in model.layers)


def test_two_split_activations_may_meet() -> None:
    x = keras.Input((4,))
    h = layers.Multiply()([layers.Dense(8, name="up")(x), layers.Dense(8, name="gate")(x)])
    model = keras.Model(x, layers.Dense(4, name="down")(keras.activations.silu(h)))
    convert(model, {"up|gate": "column", "down": "row"}, position())
    assert is_open(model) == (True, True)
    assert not model.get_layer("gate").gather_output


def test_in_code_nothing_stays_split() -> None:
    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="block")
            self.up, self.down = layers.Dense(8, name="up"), layers.Dense(4, name="down")

        def build(self, shape: Any) -> None:
            self.up.build(shape)
            self.down.build((*shape[:-1], 8))

        def call(self, x: Any) -> Any:
            return self.down(keras.ops.softmax(self.up(x)))

    block = Block()
    model = keras.Sequential([keras.Input((4,)), block])
    convert(model, {"block/up": "column", "block/down": "row"}, position())
    assert block.up.gather_output and not block.down.input_is_split


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (mlp, {"blok/up": "column"}, "no layer path matches 'blok/up'. Paths .* up, down"),
        (mlp, {"up": "heads"}, "is a Dense, which can be split by column or row, not by heads"),
        (mlp, {"up": "column", "u.": "row"}, "only one pattern may match it"),
        (lambda: mlp(layers.PReLU(name="x")), {"u?x?": "column"}, "is a PReLU, which cannot be"),
        (
            lambda: keras.Sequential([keras.Input((4,)), layers.Dense(9, name="up")]),
            {"up": "column"},
            "up/kernel' of shape .4, 9. cannot be split over 2 ranks .* 9 is not a multiple of 2",
        ),
        (
            lambda: keras.Sequential([layers.Dense(8, name="up")]),
            {"up": "column"},
            "start it with keras.Input",
        ),
        (
            lambda: mlp(last=layers.Dense(4, name="down", kernel_regularizer=ORTHOGONAL)),
            {"down": "row"},
            "its regularizer OrthogonalRegularizer",
        ),
        (
            lambda: mlp(last=layers.Dense(4, name="down", kernel_constraint="max_norm")),
            {"down": "row"},
            "its constraint MaxNorm needs all of that dimension",
        ),
    ],
)
def test_plans_that_cannot_be(model: Any, plan: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(model(), plan, position())


def test_heads_that_do_not_divide() -> None:
    x = keras.Input((5, 6))
    model = keras.Model(x, layers.MultiHeadAttention(3, 2, name="attention")(x, x))
    with pytest.raises(UsageError, match="3 query heads are not a multiple of the 2 ranks"):
        convert(model, {"attention": "heads"}, position())


def test_splitting_twice_is_refused() -> None:
    model = convert(mlp(), {"up": "column"}, position())
    with pytest.raises(UsageError, match="'up' is already split"):
        convert(model, {"up": "column"}, position())


def test_parts_are_slices_of_what_the_whole_model_would_have() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(5)
        up, down = layers.Dense(64, name="up"), layers.Dense(32, name="down")
        # Large enough for the kernels to wait, small enough for the biases not to.
        return keras.Sequential([keras.Input((32,)), up, layers.Dropout(0.5), down])

    whole = make()
    for index in (0, 1):
        for source in (make, make()):  # A function, and a model that has its values.
            model = convert(source, PAIR, position(index))
            for variable, other in zip(model.variables, whole.variables, strict=True):
                shard = shard_of(variable)
                expected = other.numpy() if shard is None else shard.part_of(other.numpy())
                np.testing.assert_array_equal(variable.numpy(), expected)
            kernel = model.get_layer("down").variables[0]
            assert shard_of(kernel) == Shard(0, index, 2)
            assert tuple(kernel.shape) == tuple(kernel.value.shape) == (32, 32)


def test_the_state_of_an_optimizer_is_split_with_its_variables() -> None:
    model = mlp()
    model.compile(keras.optimizers.Adam(), "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    before = {v.path: v.numpy() for v in model.optimizer.variables}
    convert(model, {"down": "row"}, position(1))
    found = {v.path: v.numpy() for v in model.optimizer.variables}
    model.optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    momentum = next(path for path in before if "down_kernel_momentum" in path)
    np.testing.assert_array_equal(found[momentum], before[momentum][4:])
    assert all(
        found[path].shape == before[path].shape for path in before if "down_kernel" not in path
    )


def test_a_split_model_saves_no_part_as_the_whole(tmp_path: Any) -> None:
    model = convert(mlp(), {"up": "column"}, position())
    with pytest.raises(UsageError, match="save the whole model on all ranks"):
        model.save(tmp_path / "part.keras")


def test_weights_that_other_code_reads_are_not_split() -> None:
    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = layers.Embedding(8, 4, name="words")

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(self.words(x), keras.ops.transpose(self.words.embeddings))

    model = Tied()
    model(np.zeros((1, 2), "int32"))
    convert(model, {"words": "vocabulary"}, position(size=1))
    assert model(np.zeros((1, 2), "int32")).shape == (1, 2, 8)
    convert(model, {"words": "vocabulary"}, position())
    with pytest.raises(
        UsageError, match="'words' is split over ranks, and no rank holds its whole"
    ):
        _ = model.words.embeddings
    up = convert(mlp(), {"up": "column"}, position()).get_layer("up")
    with pytest.raises(UsageError, match="leave it out of the layout's split"):
        _ = up.kernel


def test_the_configuration_is_that_of_the_whole_model() -> None:
    config = convert(mlp(), PAIR, position()).get_config()
    assert config == mlp().get_config() | {"layers": config["layers"]}
    whole = keras.Sequential.from_config(config)
    assert [type(layer).__name__ for layer in whole.layers] == ["Dense", "Dense"]
    assert whole.count_params() == mlp().count_params()


def test_waiting_variables_take_no_memory_and_then_their_values() -> None:
    keras.utils.set_random_seed(5)
    expected = layers.Dense(64, name="big")
    expected.build((None, 64))
    keras.utils.set_random_seed(5)
    with deferred_variables_of() as waiting:
        model = keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.Dropout(0.5)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    kernel, bias = model.layers[0].kernel, model.layers[0].bias
    assert waiting == [kernel] and is_deferred(kernel) and not is_deferred(bias)
    initialize(kernel)
    np.testing.assert_array_equal(kernel.numpy(), expected.kernel.numpy())


def test_a_waiting_variable_that_is_given_a_value_keeps_it() -> None:
    value = np.full((64, 64), 3.0, "float32")
    with deferred_variables_of() as waiting:
        layer = layers.Dense(64)
        layer.build((None, 64))
        layer.set_weights([value, np.zeros(64)])
    for variable in waiting:
        initialize(variable)
    np.testing.assert_array_equal(layer.kernel.numpy(), value)
