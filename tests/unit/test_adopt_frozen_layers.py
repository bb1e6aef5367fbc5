"""`hvdtrain run --adopt`: layers that are frozen without compiling the model again."""

from __future__ import annotations

import keras

from hvdtrain.adopt.frozen_layers import trained_as, trained_layers


def flags(model: keras.Model) -> list[bool]:
    return [value for _, _, value in trained_layers(model)]


def test_layers_are_trained_as_before_and_left_as_the_script_wants() -> None:
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)])
    before = trained_layers(model)
    base.trainable = False
    frozen = flags(model)
    with trained_as(before):
        assert all(flags(model)) and len(model.trainable_variables) == 6
    assert flags(model) == frozen and len(model.trainable_variables) == 2


def test_what_a_callback_freezes_stays_frozen() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    with trained_as(trained_layers(model)):
        model.layers[0].trainable = False
    assert [layer.trainable for layer in model.layers] == [False, True]
    assert len(model.trainable_variables) == 2
