"""What `hvdtrain bench overhead` times: the same examples, once an epoch, by both ways."""

import keras
import numpy as np

from hvdtrain.bench.models import mlp
from hvdtrain.bench.overhead import OverheadPass
from hvdtrain.bench.overhead_rank import EPOCHS, Clock, dataset, examples


def tiny() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(10)])


def test_a_dataset_holds_the_same_examples_as_the_arrays():
    x, y = examples(tiny(), 12, seed=0)
    batches = [(a.numpy(), b.numpy()) for a, b in dataset((x, y), 5)]
    assert [len(b) for _, b in batches] == [5, 5, 2]
    rows = {(*a.tolist(), int(b)) for xs, ys in batches for a, b in zip(xs, ys, strict=True)}
    assert rows == {(*a.tolist(), int(b)) for a, b in zip(x, y, strict=True)}


def test_the_clock_notes_the_epochs_that_are_timed():
    model, clock = tiny(), Clock()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*examples(model, 8, seed=0), epochs=1 + EPOCHS, verbose=0, callbacks=[clock])
    assert len(clock.times) == 1 + EPOCHS + 1 and clock.times == sorted(clock.times)


def test_the_network_has_the_parameters_that_it_says():
    keras.backend.clear_session()
    assert mlp().count_params() == 22_609_930


def test_the_ratio():
    assert np.isclose(OverheadPass(fit=10.0, trainer=10.5).ratio, 1.05)
