"""What each rank has of its own: seeds, and its part of gradients that wait for an update. Ranks in threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

from thread_ranks import run_ranks, thread_ranks

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.gradient_accumulation import divided_accumulators
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.replicas import broadcast_variables
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.keras_internals.variables import seed_variables

RANKS = 4


def test_every_rank_has_seeds_of_its_own_and_the_first_keeps_them() -> None:
    model = keras.Sequential([keras.layers.Dropout(0.5, seed=3), keras.layers.Dropout(0.5, seed=4)])
    before = [variable.numpy().tolist() for variable in seed_variables(model)]
    found = []
    for rank in range(RANKS):
        for variable, value in zip(seed_variables(model), before, strict=True):
            variable.assign(value)
        fold_rank_into_seeds(seed_variables(model), rank)
        found.append([variable.numpy().tolist() for variable in seed_variables(model)])
    assert found[0] == before
    assert len({str(seeds) for seeds in found}) == RANKS


def test_a_broadcast_gives_every_rank_its_own_dropout_masks() -> None:
    """As a loop of one's own broadcasts model.variables: with one seed all ranks would drop the same units."""
    examples = np.ones((1, 64), "float32")

    def network(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((64,)), *layers])

    def work(ranks: Communicator) -> Any:
        model = models[ranks.rank()]
        for _ in range(
            2
        ):  # A second broadcast, as of a model that was loaded, must not make them equal again.
            broadcast_variables([v.value for v in model.variables], 0, process_set=ranks)
        return model.layers[0](examples, training=True).numpy(), model.get_weights()

    models = [network(seed) for seed in (1, 2)]
    (first, weights), (second, others) = run_ranks(thread_ranks(2), work)
    alone = network(1)
    np.testing.assert_array_equal(first, alone.layers[0](examples, training=True).numpy())
    assert not np.array_equal(first, second)
    for one, other, wanted in zip(weights, others, alone.get_weights(), strict=True):
        np.testing.assert_array_equal(one, wanted)
        np.testing.assert_array_equal(other, wanted)


@pytest.mark.parametrize("adds_up", [True, False])
def test_parts_of_waiting_gradients_make_them_up(adds_up: bool) -> None:
    ranks: Any = SimpleNamespace(size=lambda: RANKS)
    total = RANKS * divided_accumulators(6.0, Reduction(process_set=ranks, weighted=adds_up))
    assert (total if adds_up else total / RANKS) == 6.0
