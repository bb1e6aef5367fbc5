"""What `hvdtrain bench overhead` times: the same examples, once an epoch, by both ways."""

import time

import keras

from hvdtrain.bench.networks import examples, mlp
from hvdtrain.bench.overhead import EPOCHS, dataset, seconds_of_step


def tiny() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(10)])


def test_a_dataset_holds_the_same_examples_as_the_arrays():
    x, y = examples(tiny(), 12, seed=0)
    batches = [(a.numpy(), b.numpy()) for a, b in dataset((x, y), 5)]
    assert [len(b) for _, b in batches] == [5, 5, 2]
    rows = {(*a.tolist(), int(b)) for xs, ys in batches for a, b in zip(xs, ys, strict=True)}
    assert rows == {(*a.tolist(), int(b)) for a, b in zip(x, y, strict=True)}


def test_the_first_epoch_is_not_timed():
    slow = 0.3

    def fit(callbacks: list[keras.callbacks.Callback], **_: object) -> None:
        for epoch in range(1 + EPOCHS):
            callbacks[0].on_epoch_begin(epoch, {})
            time.sleep(0.01 if epoch else slow)
        callbacks[0].on_train_end({})

    assert 0.01 / 4 <= seconds_of_step(fit, {}, steps=4) < slow / 4


def test_the_network_has_the_parameters_that_it_says():
    keras.backend.clear_session()
    assert mlp().count_params() == 22_609_930
