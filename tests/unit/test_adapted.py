"""What ranks compare of layers that have been adapted. No ranks."""

from __future__ import annotations

import keras
import numpy as np

from hvdtrain.keras_internals.adapted import adapted_statistics


def network(*adapted: bool) -> keras.Model:
    x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    layers = [keras.layers.Normalization(name=f"normalization_{n}") for n in range(len(adapted))]
    for number, (layer, learns) in enumerate(zip(layers, adapted, strict=True)):
        if learns:
            layer.adapt(x * (number + 1))
    return keras.Sequential([keras.Input((3,)), *layers])


def test_statistics_of_one_layer_have_one_name_on_all_ranks() -> None:
    """Whatever other layers a rank has adapted."""
    both, second = adapted_statistics(network(True, True)), adapted_statistics(network(False, True))
    assert list(second) == ["the mean and variance 1 of 'normalization'"]
    assert len(both) == 2
    assert both.items() >= second.items()
    assert adapted_statistics(network(False, False)) == {}
